"""Give every object a `.save()`.

Blocks write `value.save()` on tensors, tuples and lists alike. A method that every object has can
only live on `object`, whose dictionary CPython hides behind a read-only view; the view's one
referent is the dictionary itself.

CAUTION: anyio refuses to define a class whose `dir()` holds a name without an annotation, so it
is imported first where it is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
from typing import Any

from nnsight_pp.core.saved import save


def _save(self: Any) -> Any:
    """Mark this object to be returned from the outermost trace, and return it."""
    return save(self)


def mount_save() -> None:
    """Add `.save()` to every object, once per process."""
    with contextlib.suppress(ImportError):
        importlib.import_module("anyio")
    if "save" not in object.__dict__:
        names: dict[str, Any] = gc.get_referents(object.__dict__)[0]
        _save.__name__ = _save.__qualname__ = "save"
        names["save"] = _save
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))
