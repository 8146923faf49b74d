"""Give the values that blocks handle a `.save()`.

Blocks write `value.save()` on tensors, tuples, lists and numbers alike, so these types get a
method. Not `object`: libraries walk the `dir()` of their own classes and stumble over a name that
they did not put there (torch 2.13's inductor generates code for it, anyio refuses to define the
class). A served value of any other type gets the method when it is served.

A built-in type's dictionary hides behind a read-only view; the view's one referent is the
dictionary itself.
"""

from __future__ import annotations

import collections
import ctypes
import gc
from typing import Any, TypeVar

import numpy as np
import torch

from nnsight_pp.core.saved import save
from nnsight_pp.core.settings import CONFIG

T = TypeVar("T")
_VALUE_TYPES = (
    list, dict, tuple, set, frozenset, str, bytes, int, float, complex, type(None),
    bytearray, range, collections.deque, np.ndarray, np.generic,
    torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
# Types that have the method, or one of their own of that name.
_mounted: set[type] = set()


def _mount(kind: type) -> None:
    if not hasattr(kind, "save"):
        try:
            type.__setattr__(kind, "save", save)
        except TypeError:  # a type written in C
            names: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
            names["save"] = save
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
    _mounted.add(kind)


def mount_save() -> None:
    """Add `.save()` to tensors, arrays and Python's own value types, once per process."""
    if not CONFIG.APP.PYMOUNT:
        return
    for kind in _VALUE_TYPES:
        if kind not in _mounted:
            _mount(kind)


def savable(value: T) -> T:
    """Return ``value``, whose type has a `.save()` from now on."""
    kind = type(value)
    if kind not in _mounted and CONFIG.APP.PYMOUNT:
        _mount(kind)
    return value


class Object(torch.Tensor):
    """For hints only: what a block reads is like a tensor, and has a `.save()`."""

    def save(self) -> Object:
        """Mark this object to be returned from the outermost trace, and return it."""
        return save(self)
