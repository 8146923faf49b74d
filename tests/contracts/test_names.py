"""One word per thing: base names, banned module names, and words we do not use."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from contracts.sources import PACKAGE, Source, sources

BANNED_IN_MODULE_NAMES = {"utils", "util", "helpers", "common", "manager", "handler", "base"}

# Each is another library's noun for a thing that has a word here (in brackets).
# Everyday words of the same list (body, key, call ...) are left to review.
NEVER = {
    "mediator": "worker",
    "invoker": "worker",
    "intervention": "block",
    "occurrence": "visit",
    "provider": "location",
    "requester": "ask",
    "fragment": "part",
    "batch_group": "rows",
    "harvest": "report",
    "dangling": "unwind",
    "pp_rank": "stage",
    "shard_id": "tp rank",
    "worker_process": "rank",
}
# Upstream spelling is met in these two.
UPSTREAM = ("engines/vllm/rank.py", "engines/vllm/compat.py")


def words(name: str) -> str:
    """Return ``name`` in snake case: ``BatchGroupOf`` and ``_batch_group_of`` are the same."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def declared_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of classes, functions, arguments and attributes that a file declares."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.ClassDef(body=body):
                yield from (b.target.id for b in body if isinstance(b, ast.AnnAssign))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def never_words(name: str) -> list[str]:
    return [word for word in NEVER if re.search(rf"(^|_){word}s?(_|$)", words(name))]


def test_base_names_are_unique():
    stems = Counter(
        source.path.stem
        for source in sources()
        if source.path.name not in ("__init__.py", "__main__.py")
    )
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_no_module_is_named_after_nothing():
    named = {source.path.relative_to(PACKAGE).with_suffix("") for source in sources()}
    bad = [
        str(path)
        for path in named
        if BANNED_IN_MODULE_NAMES & {word for part in path.parts for word in part.split("_")}
    ]
    assert bad == []


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_words_are_ours(source: Source):
    if source.name.endswith(UPSTREAM):
        return
    bad = {
        name: [NEVER[word] for word in never_words(name)]
        for name in declared_names(source.tree)
        if never_words(name)
    }
    assert not bad, f"{source.name}: name, and the word to use: {bad}"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("BatchGroupOf", ["batch_group"]),
        ("_providers", ["provider"]),
        ("fragmentation", []),
        ("pp_ranks", ["pp_rank"]),
        ("worker", []),
    ],
)
def test_a_word_is_found_however_it_is_spelled(name: str, found: list[str]):
    assert never_words(name) == found
