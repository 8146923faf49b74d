"""Write names into a user's frame.

A frame's fast locals are not a mapping. Up to Python 3.12 they are flushed from `f_locals` through
the C API; from 3.13 on `f_locals` writes through (PEP 667).
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType, FrameType

# Whether `f_locals` is a copy, which is written back as a whole.
_IS_COPIED = sys.version_info < (3, 13)


# The local names of each function that was written into, with its code.
# Invariant: the code is kept, so that its id stays its own.
_locals: dict[int, tuple[CodeType, frozenset[str]]] = {}
_MOST_LOCALS = 1000


@functools.cache
def _write_back() -> Callable[[FrameType], None]:
    """Return what writes the copy of a frame's names into the frame."""
    if thread_state.load().name == "native":
        write_back: Callable[[FrameType], None] = load_extension().write_back
        return write_back
    locals_to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
    locals_to_fast.argtypes = [ctypes.py_object, ctypes.c_int]
    locals_to_fast.restype = None
    return lambda frame: locals_to_fast(frame, 0)


def deliver(frame: FrameType, names: Mapping[str, Any]) -> None:
    """Bind each of ``names`` in ``frame``, cells and declared globals included."""
    if not names:
        return
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class body
        frame.f_locals.update(names)
        return
    # The block is part of the function's text, so a name that is no local was declared global.
    local = _local_names(code)
    scope = frame.f_locals
    for name, value in names.items():
        if name in local:
            scope[name] = value
        else:
            frame.f_globals[name] = value
    if _IS_COPIED:
        _write_back()(frame)
        scope.clear()


def _local_names(code: CodeType) -> frozenset[str]:
    known = _locals.get(id(code))
    if known is None:
        if len(_locals) >= _MOST_LOCALS:
            _locals.clear()
        found = frozenset({*code.co_varnames, *code.co_cellvars, *code.co_freevars})
        known = _locals[id(code)] = (code, found)
    return known[1]


def local_names(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the names of ``frame``, which a function runs in.

    Up to Python 3.12 the frame has a copy too once its names were looked at. That one lives as long
    as the frame, and would keep what the user has deleted, so it is emptied.
    """
    seen = frame.f_locals
    names = dict(seen)
    if _IS_COPIED:
        seen.clear()
    return names
