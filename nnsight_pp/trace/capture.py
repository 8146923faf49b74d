"""Take the body of a `with` statement out of the frame that holds it, and keep it from running.

The body's text is found by the frame's file and line: in a file, in a notebook cell (both through
`linecache`), or in the text of `python -c`. The body is kept from running by a trace function on
the caller's frame that raises at its first line; `__exit__` swallows that and puts the caller's
own trace functions (a debugger's, coverage's) back.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.errors import BlockShapeError, Where, WithBlockNotFoundError, explain
from nnsight_pp.trace.lines import source_lines
from nnsight_pp.trace.loaded import is_as_loaded
from nnsight_pp.trace.usual import block_in, position, usual_block

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from nnsight_pp.core.block import Block


class BodySkipped(BaseException):
    """Raised at the first line of a captured body. Never reaches the user."""


def forget_skip(error: BaseException) -> None:
    """Take `BodySkipped` out of what ``error`` says it happened during."""
    seen: set[int] = set()
    while error.__context__ is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error.__context__, BodySkipped):
            error.__context__ = None
            return
        error = error.__context__


# What the items behind a tracer are entered around is called by this name.
WITHIN = "__run_block__"

# The block of each `with` already read, with the code that holds it and the lines it was read
# from. Invariant: the code is kept, so that its id stays its own.
_known: dict[tuple[int, int], tuple[CodeType, list[str], Block]] = {}
_MOST_KNOWN = 1000
# The last file that was parsed: most traces of a file are read one after the other.
_parsed: dict[str, tuple[list[str], ast.Module]] = {}


def block_at(frame: FrameType) -> Block:
    """Return the body of the `with` statement that ``frame`` enters now.

    Raises:
        WithBlockNotFoundError: The text is not readable, holds no `with` there, or was edited
            since it was loaded.
        BlockShapeError: The body stands on the `with` line, or starts with `try:`.
        SyntaxError: The body holds `return` or another statement that would leave it.
    """
    code = frame.f_code
    site = (id(code), frame.f_lasti)
    known = _known.get(site)
    if known is not None:
        entry = linecache.cache.get(code.co_filename)
        if entry is not None and len(entry) > 1 and known[1] is entry[2]:  # the usual case
            return known[2]
    lines = source_lines(code.co_filename)
    if known is not None and known[1] is lines:
        return known[2]
    where = Where(code.co_filename, frame.f_lineno, code.co_name)
    if not lines:
        raise WithBlockNotFoundError(
            explain(
                f"There is no source text for {code.co_filename!r}.",
                where=where,
                why="A block travels to the model as source text.",
                todo="Put the block into a file, a notebook cell, or `python -c`.",
            )
        )
    block = _loaded_block(frame, lines)
    if block is None:
        # The module may have been loaded again since its text was read.
        linecache.checkcache(code.co_filename)
        lines = source_lines(code.co_filename)
        block = _loaded_block(frame, lines)
    if block is None:
        raise WithBlockNotFoundError(
            explain(
                f"{code.co_filename!r} was edited since it was loaded.",
                where=where,
                why="The block is read from the file's text, which is no longer that of the code "
                "that runs, so there is no source text for it.",
                todo="Load the module again, or restart Python.",
            )
        )
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[site] = (code, lines, block)
    return block


def _loaded_block(frame: FrameType, lines: list[str]) -> Block | None:
    """Return the block of ``frame`` in ``lines``, or None where these are not its text."""
    code = frame.f_code
    block = usual_block(frame, lines)
    if block is not None:
        return block
    node = _with_at(frame, lines)
    if node is None and WITHIN in frame.f_globals:
        raise BlockShapeError(
            explain(
                "Two tracers stand in one `with`.",
                where=Where(code.co_filename, frame.f_lineno + 1, code.co_name),
                why="A body is the block of one run.",
                todo="Write a `with` for each, one inside the other or one after the other.",
            )
        )
    if node is None:
        whole = range(1, len(lines) + 1)
        if not is_as_loaded(code, frame.f_globals, lines, whole):
            return None
        raise WithBlockNotFoundError(
            explain(
                f"There is no `with` statement at line {frame.f_lineno} of {code.co_filename!r}.",
                where=Where(code.co_filename, frame.f_lineno, code.co_name),
                why="A run starts only through a `with` statement at the call site.",
                todo="Write `with model.trace(...) as tracer:` where the run shall start.",
            )
        )
    start = _first_line(node)
    last = node.body[-1].end_lineno or start
    if not is_as_loaded(code, frame.f_globals, lines, range(start, last + 1)):
        return None
    if start <= _header_end(node) and all(_is_nothing(one) for one in node.body):
        text = " pass\n"
    else:
        _check_shape(node, start, frame)
        text = "".join(lines[start - 1 : last])
    around = ", ".join(ast.unparse(item) for item in _items_behind(node, frame))
    block = block_in(code, start, text, around)
    # What cannot be compiled is refused before anything runs.
    block.code()
    return block


def _tree_of(filename: str, lines: list[str]) -> ast.Module | None:
    parsed = _parsed.get(filename)
    if parsed is None or parsed[0] is not lines:
        try:
            parsed = (lines, ast.parse("".join(lines), filename))
        except SyntaxError:
            return None
        _parsed.clear()
        _parsed[filename] = parsed
    return parsed[1]


def _with_at(frame: FrameType, lines: list[str]) -> ast.With | None:
    """Return the `with` that ``frame`` enters now.

    Its place in the code says which; where the code has no columns, it is the innermost one whose
    header holds the line.
    """
    place, line = position(frame), frame.f_lineno
    alone = _statement_at(place, lines)
    if alone is not None:
        return alone
    tree = _tree_of(frame.f_code.co_filename, lines)
    if tree is None:
        return None
    found = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.With):
            continue
        if place[2] is not None:
            # The place is that of the whole statement, or of one of its items.
            if any(_place(one) == place for one in (node, *_expressions(node))):
                return node
        elif node.lineno <= line <= max(_header_end(node), node.body[0].lineno - 1) and (
            found is None or node.lineno >= found.lineno
        ):
            found = node
    return found


def _statement_at(place: tuple[int | None, ...], lines: list[str]) -> ast.With | None:
    """Return the `with` that is all of ``place``, read from its own lines, or None.

    Cost: that of the statement, not of its file.
    """
    first, last, column, _ = place
    if first is None or last is None or column is None or last > len(lines):
        return None
    if column and first == 1:
        return None
    if lines[first - 1][:column].strip(" \t"):
        return None  # it does not begin its line
    # Behind empty lines, so that its own numbers are those of the file.
    text = "".join(lines[first - 1 : last])
    before = "\n" * (first - 2) + "if 1:\n" if column else "\n" * (first - 1)
    try:
        node: ast.AST = ast.parse(before + text).body[0]
    except SyntaxError:
        return None
    if column and isinstance(node, ast.If):
        node = node.body[0]
    if not isinstance(node, ast.With):
        return None
    return node if _place(node) == place else None


def _expressions(node: ast.With) -> list[ast.expr]:
    return [item.context_expr for item in node.items]


def _place(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _header_end(node: ast.With) -> int:
    ends = [one.end_lineno or node.lineno for one in _expressions(node)]
    ends += [item.optional_vars.end_lineno or 0 for item in node.items if item.optional_vars]
    return max(ends)


def _first_line(node: ast.With) -> int:
    first = node.body[0]
    return min([first.lineno, *[one.lineno for one in getattr(first, "decorator_list", ())]])


def _items_behind(node: ast.With, frame: FrameType) -> list[ast.withitem]:
    """Return the items of ``node`` behind the tracer that ``frame`` enters."""
    if len(node.items) == 1:
        return []
    place = position(frame)
    if place != _place(node):
        places = [_place(one) for one in _expressions(node)]
        return node.items[places.index(place) + 1 :] if place in places else []
    # One instruction per item enters it, all with the place of the whole statement.
    now = next(one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti)
    entered = [
        one.offset
        for one in dis.get_instructions(frame.f_code)
        if one.opname == now.opname and one.positions is not None and tuple(one.positions) == place
    ]
    return node.items[entered.index(frame.f_lasti) + 1 :]


def _begin_of_items(frame: FrameType) -> int | None:
    """Return where ``frame`` begins with the items behind the tracer that it enters now."""
    node = _with_at(frame, source_lines(frame.f_code.co_filename))
    if node is None:
        return None
    place = _place(_items_behind(node, frame)[0].context_expr)
    for one in dis.get_instructions(frame.f_code):
        at = tuple(one.positions or (None,) * 4)
        if one.offset > frame.f_lasti and None not in at:
            begin, end = (at[0], at[2]), (at[1], at[3])
            if (place[0], place[2]) <= begin and end <= (place[1], place[3]):  # type: ignore[operator]
                return one.offset
    return None


def _check_shape(node: ast.With, start: int, frame: FrameType) -> None:
    filename, name = frame.f_code.co_filename, frame.f_code.co_name
    where = Where(filename, start, name)
    if start <= _header_end(node):
        raise BlockShapeError(
            explain(
                "The body of a traced `with` must start on its own line.",
                where=where,
                why="A body on the line of its `with` cannot be told from it while it runs.",
                todo="Move the body to the next line.",
            )
        )
    if _starts_with_try(node.body):
        raise BlockShapeError(
            explain(
                "The body of a traced `with` cannot start with `try:`.",
                where=where,
                why="What keeps the body from running here would be caught by it.",
                todo="Put a statement before the `try:`, or the `with` inside it.",
            )
        )


def _starts_with_try(body: list[ast.stmt]) -> bool:
    """Tell whether a `try:` is the first to run, behind statements that compile to nothing."""
    for node in body:
        if isinstance(node, ast.Try | ast.TryStar):
            return True
        if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant):
            return _starts_with_try(node.body if node.test.value else node.orelse)
        if not _is_nothing(node) and not isinstance(node, ast.Global):
            return False
    return False


def _is_nothing(node: ast.stmt) -> bool:
    """Tell whether ``node`` compiles to nothing, as `pass` and `...` do."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Pass)


@final
class BodyCapture:
    """The body of one `with`, kept from running in its frame.

    `BodyCapture(frame)` and then ``sys.settrace(trace_nothing)`` in `__enter__`,
    ``sys.settrace(outer)`` and `release` in `__exit__`; between them the first line of the body
    raises `BodySkipped`.

    Note [Calls and returns are balanced]
        A trace function must be on for a frame's own one to be called, and a tracer written in C
        never calls it: for the few instructions in between a plain function stands in.
        Coverage's counts calls and returns. It would see the call of `__enter__` but not its
        return, and the return of `__exit__` but not its call, so it is told of them.

    Raises:
        WithBlockNotFoundError: See `block_at`, which lists the others.
    """

    __slots__ = ("_body", "_later", "_local", "block", "counting", "frame", "outer")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.block = block_at(frame)
        self.outer: Any = sys.gettrace()
        self._local: Any = frame.f_trace
        # Coverage's tracer written in C, or None.
        self.counting: Any = None
        if self.outer is not None:
            is_counting = type(self.outer).__module__.partition(".")[0] == "coverage"
            self.counting = self.outer if is_counting else None
        known = self.block.known
        self._body = known.lines
        # The first instruction of the items behind the tracer: these are entered in the block.
        self._later = None
        if self.block.around:
            self._later = _begin_of_items(frame)
            frame.f_trace_opcodes = self._later is not None
        # A block of nothing may run, and what it raises no handler would catch.
        if not known.facts.does_nothing:
            frame.f_trace = self._skip

    # A method, not a closure: one that returns itself would keep the frame.
    def _skip(self, at: FrameType, event: str, _: object) -> Any:
        # A header of several lines goes on after the tracer was entered.
        if at is self.frame and event == "line" and at.f_lineno in self._body:
            raise BodySkipped
        if at is self.frame and event == "opcode" and at.f_lasti == self._later:
            raise BodySkipped
        return self._skip

    def release(self) -> None:
        """Put back the frame's own trace function."""
        if self._later is not None:
            self.frame.f_trace_opcodes = False
        self.frame.f_trace = self._local


def trace_nothing(*_: object) -> None:
    """Trace no frame: stands in for the caller's trace function."""
    return None
