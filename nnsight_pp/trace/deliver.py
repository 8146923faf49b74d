"""Write names into a user's frame.

A frame's fast locals are not a mapping. Up to Python 3.12 they are flushed from `f_locals` through
the C API; from 3.13 on `f_locals` writes through (PEP 667).
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType


def deliver(frame: FrameType, names: Mapping[str, Any]) -> None:
    """Bind each of ``names`` in ``frame``, cells included."""
    if not names:
        return
    scope = frame.f_locals
    scope.update(names)
    if sys.version_info < (3, 13) and scope is not frame.f_globals:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
