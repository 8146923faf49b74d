"""Take the body of a `with` statement out of the frame that holds it, and keep it from running.

The body's text is found by the frame's file and line: in a file, in a notebook cell (both through
`linecache`), or in the text of `python -c`. The body is kept from running by a trace function on
the caller's frame that raises at its first line; `__exit__` swallows that and puts the caller's
own trace functions (a debugger's, coverage's) back.
"""

from __future__ import annotations

import ast
import linecache
import sys
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.block import Block
from nnsight_pp.errors import BlockShapeError, Where, WithBlockNotFoundError, explain

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    TraceFunction = Callable[[FrameType, str, Any], Any]


class BodySkipped(BaseException):
    """Raised at the first line of a captured body. Never reaches the user."""


def forget_skip(error: BaseException) -> None:
    """Take `BodySkipped` out of what ``error`` says it happened during."""
    while error.__context__ is not None:
        if isinstance(error.__context__, BodySkipped):
            error.__context__ = None
            return
        error = error.__context__


_Site = tuple[str, int, str, int]
# The block of each `with` line already read, with the lines it was read from.
_known: dict[_Site, tuple[list[str], Block]] = {}


def source_lines(filename: str) -> list[str]:
    """Return the lines of ``filename`` with their ends, or an empty list when there are none."""
    if filename == "<string>":
        return _command_lines()
    return linecache.getlines(filename)


def _command_lines() -> list[str]:
    """Return the text of `python -c TEXT`, which is in no file."""
    argv = sys.orig_argv
    for position, argument in enumerate(argv[1:], 1):
        if argument == "-c" and position + 1 < len(argv):
            return argv[position + 1].splitlines(keepends=True)
        if not argument.startswith("-"):
            break
    return []


def block_at(frame: FrameType) -> Block:
    """Return the body of the `with` statement at the current line of ``frame``.

    Raises:
        WithBlockNotFoundError: The text is not readable, or holds no `with` there.
        BlockShapeError: The body stands on the `with` line, or starts with `try:`.
    """
    code = frame.f_code
    line = frame.f_lineno
    site = (code.co_filename, line, code.co_name, code.co_firstlineno)
    lines = source_lines(code.co_filename)
    known = _known.get(site)
    if known is not None and known[0] is lines:
        return known[1]
    where = Where(code.co_filename, line, code.co_name)
    if not lines:
        raise WithBlockNotFoundError(
            explain(
                f"There is no source text for {code.co_filename!r}.",
                where=where,
                why="A block travels to the model as source text.",
                todo="Put the block into a file, a notebook cell, or `python -c`.",
            )
        )
    node = _with_at(lines, code.co_filename, line)
    if node is None:
        raise WithBlockNotFoundError(
            explain(
                f"There is no `with` statement at line {line} of {code.co_filename!r}.",
                where=where,
                why="A run starts only through a `with` statement at the call site.",
                todo="Write `with model.trace(...) as tracer:` where the run shall start.",
            )
        )
    block = _block_of(node, lines, code.co_filename, code.co_name)
    _known[site] = (lines, block)
    return block


def _with_at(lines: list[str], filename: str, line: int) -> ast.With | None:
    """Return the innermost `with` whose header holds ``line``.

    A header may span lines, and the line of a frame that enters it is the keyword's or that of
    the item, depending on the Python version.
    """
    try:
        tree = ast.parse("".join(lines), filename)
    except SyntaxError:  # a notebook cell with magics: its text cannot be parsed as a whole
        return None
    found = None
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and node.lineno <= line:
            ends = [item.context_expr.end_lineno or 0 for item in node.items]
            last = max(*ends, node.body[0].lineno - 1, node.lineno)
            if line <= last and (found is None or node.lineno >= found.lineno):
                found = node
    return found


def _block_of(node: ast.With, lines: list[str], filename: str, name: str) -> Block:
    first, last = node.body[0], node.body[-1]
    start = min([first.lineno, *[item.lineno for item in getattr(first, "decorator_list", ())]])
    header_end = max(item.context_expr.end_lineno or node.lineno for item in node.items)
    where = Where(filename, start, name)
    if start <= header_end:
        raise BlockShapeError(
            explain(
                "The body of a traced `with` must start on its own line.",
                where=where,
                why="A body on the line of its `with` cannot be told from it while it runs.",
                todo="Move the body to the next line.",
            )
        )
    if isinstance(first, ast.Try | ast.TryStar):
        raise BlockShapeError(
            explain(
                "The body of a traced `with` cannot start with `try:`.",
                where=where,
                why="What keeps the body from running here would be caught by it.",
                todo="Put a statement before the `try:`, or the `with` inside it.",
            )
        )
    text = "".join(lines[start - 1 : last.end_lineno])
    return Block(filename, start, text if text.endswith("\n") else text + "\n", name)


@final
class BodyGuard:
    """Keeps the body of one `with` from running in its frame.

    `install` in `__enter__`, `remove` in `__exit__`; between them the frame's next line raises
    `BodySkipped`.
    """

    __slots__ = ("_frame", "_local", "_outer")

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        self._outer: TraceFunction | None = None
        self._local: TraceFunction | None = None

    def install(self) -> None:
        """Make the next line of the frame raise."""
        frame = self._frame
        assert frame is not None
        self._outer = sys.gettrace()
        self._local = frame.f_trace

        def skip(at: FrameType, event: str, _: object) -> Any:
            if at is frame and event == "line":
                raise BodySkipped
            return skip

        # A trace function must be on for a frame's own one to be called, and a tracer written in
        # C never calls it: for the few instructions in between a plain function stands in.
        sys.settrace(lambda *_: None)
        frame.f_trace = skip

    def remove(self) -> None:
        """Put back the trace functions that were there before."""
        frame, self._frame = self._frame, None
        if frame is not None:
            frame.f_trace = self._local
            sys.settrace(self._outer)
