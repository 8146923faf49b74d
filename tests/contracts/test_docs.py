"""Documents name only what is there."""

import ast
import re
import textwrap
from pathlib import Path

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


# ------------------------------------------------------------------------------- the how-to pages

EXAMPLES = ROOT / "examples"
HOW_TO = ROOT / "docs" / "how-to"
# Not about one thing to do.
WITHOUT_A_PAGE = {"loading", "quickstart"}
# Needs two machines; its test is `tests/gpu/test_ray.py`.
WITHOUT_AN_EXAMPLE = {"two_nodes"}
PAGES = sorted(page for page in HOW_TO.glob("*.md") if page.stem not in WITHOUT_AN_EXAMPLE)
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def holds(text: str, part: str) -> bool:
    """Say whether the lines of ``part`` stand in ``text`` one below the other, however indented."""
    lines, wanted = text.splitlines(), part.rstrip().splitlines()
    return any(
        textwrap.dedent("\n".join(lines[start : start + len(wanted)])).splitlines() == wanted
        for start in range(len(lines))
    )


def test_every_example_has_a_page_and_every_page_an_example():
    examples = {path.stem for path in EXAMPLES.glob("*.py")} - WITHOUT_A_PAGE
    assert {page.stem for page in PAGES} == examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_stands_in_its_example(page: Path):
    example = (EXAMPLES / f"{page.stem}.py").read_text()
    fences = FENCE.findall(page.read_text())
    assert fences
    assert [fence for fence in fences if not holds(example, fence)] == []


def test_code_is_found_only_where_all_its_lines_stand_together():
    text = "def f():\n    with a:\n        b\n    c\n"
    assert holds(text, "with a:\n    b\nc\n")
    assert not holds(text, "with a:\n    c\n")
    assert not holds(text, "with a:\nb\n")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_on_a_screen_or_two(example: Path):
    assert len(example.read_text().splitlines()) <= 85


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_python_of_a_document_is_python(document: Path):
    for fence in FENCE.findall(document.read_text()):
        ast.parse(fence, str(document))


@pytest.mark.parametrize(
    "document", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_what_a_page_links_to_is_there(document: Path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
