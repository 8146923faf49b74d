"""Whether an error that a line raises would be handled by the code around it.

An index or an edit of another stage's value is deferred, and so is its error: the owner raises it
at the line, other ranks when a line needs the data. Where nobody handles it that is the same, the
request fails. Under a ``try`` the ranks would go different ways without a word, so there the value
is brought at once, and the error with it.

Source: CPython 3.11 Objects/exception_handling_notes.txt. The table of a code object names the
innermost handler of each instruction; what a handler re-raises is handled where the handler stands.
"""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

_PACKAGE = f"{__name__.partition('.')[0]}."
# Context managers that let every exception pass.
_PASSING = frozenset(
    {"no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "profile"}
)


def is_guarded() -> bool:
    """Tell whether code that has led here handles what is raised here.

    Frames of this package do not count; a greenlet's frames end with the greenlet.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (
            code.co_exceptiontable  # most have none, and nothing else is to be asked of them
            and not frame.f_globals.get("__name__", "").startswith(_PACKAGE)
            and _is_guarded_at(code, frame.f_lasti)
        ):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def _is_guarded_at(code: CodeType, offset: int) -> bool:
    table = dis._parse_exception_table(code)  # pyright: ignore[reportAttributeAccessIssue]
    if not table:
        return False
    instructions = list(dis.get_instructions(code))
    at = {one.offset: index for index, one in enumerate(instructions)}
    for _ in range(len(table)):
        entry = next((one for one in table if one.start <= offset < one.end), None)
        if entry is None:
            return False
        handler = instructions[at[entry.target] :][:3]
        names = [one.opname for one in handler]
        if names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            if not _lets_pass(instructions, table, entry.target):
                return True
        elif names[0] not in ("COPY", "CALL_INTRINSIC_1"):  # these two only raise again
            return True
        # What the handler raises again is raised by its last instruction.
        offset = next(
            one.offset
            for one in instructions[at[entry.target] :]
            if one.opname in ("RERAISE", "RAISE_VARARGS")
        )
    return True


def _lets_pass(instructions: Sequence[dis.Instruction], table: Sequence[Any], handler: int) -> bool:
    """Tell whether the ``with`` that ends in ``handler`` enters one of `_PASSING`."""
    start = min(entry.start for entry in table if entry.target == handler)
    before = [one for one in instructions if one.offset < start]
    enters = [index for index, one in enumerate(before) if one.opname == "BEFORE_WITH"]
    if not enters:
        return False
    line = before[enters[-1]].positions
    since = enters[-2] + 1 if len(enters) > 1 else 0
    return any(
        one.argval in _PASSING
        for one in before[since : enters[-1]]
        if one.opname.startswith("LOAD_")
        and line is not None
        and one.positions is not None
        and one.positions.lineno == line.lineno
    )
