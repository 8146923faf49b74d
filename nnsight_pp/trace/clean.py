"""Tracebacks that show the user's lines and the library's they called, not our own."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn

from nnsight_pp.core.settings import CONFIG

_PACKAGE = "nnsight_pp."


def without_own_frames(error: BaseException) -> BaseException:
    """Return ``error`` with this package's frames taken out of its traceback.

    When nothing else is left, the traceback stays as it was.
    """
    if CONFIG.APP.DEBUG:
        return error
    entries = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            entries.append(entry)
        entry = entry.tb_next
    chain: TracebackType | None = None
    for kept in reversed(entries):
        chain = TracebackType(chain, kept.tb_frame, kept.tb_lasti, kept.tb_lineno)
    return error if chain is None else error.with_traceback(chain)


def raise_again(error: BaseException) -> NoReturn:
    """Raise ``error`` as it was raised before: during and because of what it was then."""
    context = error.__context__
    try:
        raise without_own_frames(error)
    finally:
        error.__context__ = context
        del error  # the traceback holds this frame
