"""Documents name only what is there."""

import ast
import re

import pytest

from contracts.sources import PACKAGE, ROOT

# In backticks, or the target of a link; `a/b`, `a.py`, `tests/` but not `a.b` or `make test`.
NAMED_PATH = re.compile(r"`([\w.*-]+(?:/[\w.*{},-]*)*)`|\]\(([^)#:]+)(?:#[^)]*)?\)")
PATH_ENDINGS = (".py", ".md", ".toml", ".cpp", ".hpp", ".sh", "/")
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")


def named_paths(text: str) -> set[str]:
    found = {code or link for code, link in NAMED_PATH.findall(text)}
    return {name for name in found if name.endswith(PATH_ENDINGS)}


def exists(name: str, document: str) -> bool:
    """Say whether ``name`` is there, seen from the root, the package or the document."""
    places = (ROOT, PACKAGE, (ROOT / document).parent)
    return any(next(place.glob(name.rstrip("/")), None) is not None for place in places)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_a_document_names_exists(document: str):
    text = (ROOT / document).read_text()
    assert sorted(name for name in named_paths(text) if not exists(name, document)) == []


def test_paths_are_found_in_prose_and_links():
    text = (
        "see `core/ask.py`, `csrc/`, [map](docs/map.md#top), [web](https://a.b/c.md), `a.b`, `make`"
    )
    assert named_paths(text) == {"core/ask.py", "csrc/", "docs/map.md"}


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_names_the_two_commands(command: str):
    assert command in (ROOT / "README.md").read_text()


def test_public_names_are_the_documented_ones():
    """A line of docs/reference.md that starts with a bullet or heading and a name in backticks."""
    reference = ROOT / "docs" / "reference.md"
    if not reference.exists():
        pytest.skip("docs/reference.md is not written yet")
    documented = re.findall(r"^(?:[-*]|#+|\|) `(\w+)`?", reference.read_text(), re.MULTILINE)
    assert sorted(set(documented)) == sorted(public_names())


def public_names() -> list[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise AssertionError("nnsight_pp/__init__.py has no __all__")
