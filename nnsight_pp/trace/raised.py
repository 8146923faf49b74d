"""Raise in this process what a block raised on a rank, at the user's own lines.

The exception keeps its class. Its traceback is built anew: for each of the user's frames a tiny
code object with the same file, line and function name raises, and the frames are chained.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle

from nnsight_pp.errors import BlockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.report import Failure


def exception_of(failure: Failure) -> BaseException:
    """Return the exception of ``failure``, with the block's lines as its traceback."""
    error: BaseException | None = None
    if failure.pickled is not None:
        try:
            error = cloudpickle.loads(failure.pickled)
        except Exception:  # its class is not here, or does not take its own arguments
            error = None
    if error is None:
        error = BlockError(f"{failure.name}: {failure.text}")
    note = f"[raised in the block on stage {failure.stage}]"
    if failure.frames:
        file, line, _ = failure.frames[0]
        note = f"[raised in the block at {file}:{line}, on stage {failure.stage}]"
    error.add_note(note)
    return error.with_traceback(_traceback(failure.frames))


def _traceback(frames: Sequence[tuple[str, int, str]]) -> TracebackType | None:
    chain: TracebackType | None = None
    for file, line, name in reversed(frames):
        made = _frame_at(file, line, name)
        chain = TracebackType(chain, made.tb_frame, made.tb_lasti, made.tb_lineno)
    return chain


def _frame_at(file: str, line: int, name: str) -> TracebackType:
    """Return a traceback entry whose frame stands at ``file``:``line`` in ``name``."""
    code = compile("\n" * (line - 1) + "raise _Here", file, "exec")
    names: dict[str, Any] = {"_Here": _HereError, "__name__": name}
    try:
        exec(code.replace(co_name=name, co_qualname=name), names)
    except _HereError:
        entry = sys.exc_info()[2]
        assert entry is not None
        assert entry.tb_next is not None
        return entry.tb_next
    raise AssertionError("unreachable")


class _HereError(Exception):
    pass
