"""The syntax tree of a function that is already running, with the lines and columns of its file.

The whole file is parsed, not the function's lines cut out of it: a cut would have to be dedented,
and with it every multi-line string inside. The last file is kept, since a model's forwards come
from few.
"""

from __future__ import annotations

import ast
import linecache
from typing import TYPE_CHECKING, Any

from nnsight_pp.errors import SourceNotAvailable, explain
from nnsight_pp.trace.lines import source_lines
from nnsight_pp.trace.loaded import is_as_loaded

if TYPE_CHECKING:
    from types import CodeType, FunctionType

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_parsed: dict[str, tuple[list[str], ast.Module]] = {}


def function_node(function: FunctionType) -> tuple[FunctionNode, list[str]]:
    """Return the tree of ``function``, not to be changed, and the lines of its file.

    Raises:
        SourceNotAvailable: Its text is not readable, or is no longer what was loaded.
    """
    code = function.__code__
    filename = code.co_filename
    lines = linecache.getlines(filename, function.__globals__) or source_lines(filename)
    tree = _tree_of(filename, lines)
    node = None if tree is None else _node_of(code, tree)
    if node is None:
        raise not_available(
            f"{code.co_qualname} has no readable source.",
            f"Its text is not found in {filename!r}.",
        )
    body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    if not is_as_loaded(code, function.__globals__, lines, body):
        raise not_available(
            f"{code.co_qualname} was edited since it was loaded.",
            f"The text of {filename!r} is no longer that of the code that runs.",
        )
    return node, lines


def _tree_of(filename: str, lines: list[str]) -> ast.Module | None:
    known = _parsed.get(filename)
    if known is None or known[0] is not lines:
        try:
            known = (lines, ast.parse("".join(lines), filename))
        except SyntaxError:
            return None
        _parsed.clear()
        _parsed[filename] = known
    return known[1]


def _node_of(code: CodeType, tree: ast.Module) -> FunctionNode | None:
    """Return the function in ``tree`` that compiles to ``code``."""
    if code.co_name == "<lambda>":
        return _lambda_of(code, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *[one.lineno for one in node.decorator_list]])
            if node.name == code.co_name and first == code.co_firstlineno:
                return node
    return None


def _lambda_of(code: CodeType, tree: ast.Module) -> ast.Lambda | None:
    """Return the lambda of ``code``: the innermost that holds every place its code names."""
    places = [
        (line, column)
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None
    ]
    found: ast.Lambda | None = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Lambda) or node.lineno != code.co_firstlineno or not places:
            continue
        first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        # The first instruction has the place of no text: column 0.
        if all(first <= place <= last for place in places if place[1]):  # type: ignore[operator]
            found = node
    return found


def not_available(what: str, why: str, todo: str = "", where: Any = None) -> SourceNotAvailable:
    """Return the error for something that has no operations to look at."""
    return SourceNotAvailable(explain(what, where=where, why=why, todo=todo))
