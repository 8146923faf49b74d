"""Sizes that keep a file readable, and the share of it that is prose."""

import ast
import io
import tokenize

import pytest

from contracts.sources import Source, sources

FILE_LINES = 400
FUNCTION_LINES = 60
CLASS_LINES = 250
PROSE_SHARE = 0.45
PROSE_SHARE_OF_PACKAGE = 0.38
# Below this a file is its docstring and a few names.
PROSE_COUNTS_FROM_LINES = 80
# Files of declarations: a class there is its docstring.
DECLARATIONS = ("nnsight_pp/errors.py", "nnsight_pp/core/protocols.py")


def prose_lines(source: Source) -> set[int]:
    """Return the numbers of the lines that hold a docstring or nothing but a comment."""
    lines = set()
    for node in ast.walk(source.tree):
        if (docstring := docstring_of(node)) is not None:
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            lines.add(token.start[0])
    return {number for number in lines if source.text.splitlines()[number - 1].strip()}


def docstring_of(node: ast.AST) -> ast.Expr | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
            return first
    return None


def filled_lines(source: Source) -> int:
    return sum(1 for line in source.text.splitlines() if line.strip())


def code_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of ``node`` without its own docstring: explaining costs nothing."""
    docstring = docstring_of(node)
    spent = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - spent


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_file_is_within_its_budget(source: Source):
    over = []
    if (size := len(source.text.splitlines())) > FILE_LINES:
        over.append(f"file: {size} lines, at most {FILE_LINES}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and (size := code_lines(node)) > CLASS_LINES:
            over.append(f"class {node.name}: {size} lines, at most {CLASS_LINES}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = code_lines(node)
            if size > FUNCTION_LINES:
                over.append(f"{node.name}(): {size} lines, at most {FUNCTION_LINES}")
    filled = filled_lines(source)
    if filled >= PROSE_COUNTS_FROM_LINES and source.name not in DECLARATIONS:
        share = len(prose_lines(source)) / filled
        if share > PROSE_SHARE:
            over.append(f"prose: {share:.0%} of the file, at most {PROSE_SHARE:.0%}")
    assert not over, f"{source.name}: {'; '.join(over)}"


def test_package_is_more_code_than_prose():
    prose = sum(len(prose_lines(source)) for source in sources())
    filled = sum(filled_lines(source) for source in sources())
    assert prose / filled <= PROSE_SHARE_OF_PACKAGE, f"{prose / filled:.0%} is prose"


def test_budgets_are_counted_as_stated():
    text = (
        '"""One."""\n\n# two\ndef f():\n    """Three.\n\n    Four.\n    """\n    return 1  # code\n'
    )
    source = Source(sources()[0].path, text, ast.parse(text))
    assert prose_lines(source) == {1, 3, 5, 7, 8}
    assert filled_lines(source) == 7
    function = source.tree.body[1]
    assert isinstance(function, ast.FunctionDef)
    assert code_lines(function) == 2
