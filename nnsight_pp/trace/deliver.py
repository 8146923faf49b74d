"""Write names into a user's frame.

A frame's fast locals are not a mapping. Up to Python 3.12 they are flushed from `f_locals` through
the C API; from 3.13 on `f_locals` writes through (PEP 667).
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType


def deliver(frame: FrameType, names: Mapping[str, Any]) -> None:
    """Bind each of ``names`` in ``frame``, cells and declared globals included."""
    if not names:
        return
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class body
        frame.f_locals.update(names)
        return
    # The block is part of the function's text, so a name that is no local was declared global.
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    frame.f_globals.update({name: names[name] for name in names if name not in local})
    scope = frame.f_locals
    scope.update({name: names[name] for name in names if name in local})
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def let_go(frame: FrameType) -> None:
    """Empty the copy of ``frame``'s names that looking at them has left on it.

    Up to Python 3.12 that copy lives as long as the frame, and keeps what the user has deleted.
    """
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()
