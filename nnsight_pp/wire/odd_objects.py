"""Objects of Python's own that pickling refuses, or turns into copies of what they look at.

A view of a dict, or a memoryview, looks at its object on the ranks too. A module of the user's own
comes with what the block's code may mention of it, as it stands now: the ranks' own import of its
file would give what the file says. A function with a cache begins with an empty one.
"""

from __future__ import annotations

import functools
import gc
import pickle
from array import array
from collections import OrderedDict
from operator import methodcaller
from types import MappingProxyType, ModuleType
from typing import Any, final

import numpy as np

from nnsight_pp.wire.shared_memory import span_of_buffer

# They own their memory, and others may look into it.
BUFFERS = (bytearray, array)
_OF_A_MODULE = ("__package__", "__name__", "__path__", "__file__")
_VIEWS = {
    type(getattr(kind(), name)()): name
    for kind in (dict, OrderedDict)
    for name in ("keys", "values", "items")
}


@final
class ShownModule(ModuleType):
    """A module of the user's own on a rank; its names are what functions of it see as globals."""

    def shown(self) -> dict[str, Any]:
        """Return its names, without those that every module has."""
        return {name: one for name, one in vars(self).items() if not name.startswith("__")}


@final
class Beginning:
    """Stands, where things are pickled, for a module before it has got its names."""

    def __init__(self, module: ModuleType) -> None:
        names = vars(module)
        self._own = {one: names[one] for one in _OF_A_MODULE if one in names}
        self._name = module.__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return _begun, (self._name, self._own)


@final
class GlobalsOf(dict[str, Any]):
    """Stands, where functions are pickled, for the names of their module."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.beginning = Beginning(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return vars, (self.beginning,)


def shown_module(beginning: Beginning, names: dict[str, Any]) -> tuple[Any, ...]:
    """Return how a module with these ``names`` is pickled."""
    return _itself, (beginning,), names, None, None, _put_names


def _begun(name: str, own: dict[str, Any]) -> ShownModule:
    module = ShownModule(name)
    vars(module).update(own)
    return module


def _itself(module: ShownModule) -> ShownModule:
    return module


def _put_names(module: ShownModule, names: dict[str, Any]) -> None:
    vars(module).update(names)


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """Return how ``obj`` is pickled, or None where pickle knows.

    Raises:
        PicklingError: It cannot travel.
    """
    kind: Any = type(obj)
    if kind is functools.cached_property:
        return _property, (obj.func, obj.attrname)
    if kind is functools._lru_cache_wrapper:
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    return reduced_view(obj)


def reduced_view(obj: Any) -> tuple[Any, ...] | None:
    """Return how ``obj``, which looks at another object, is pickled; None for other objects.

    Raises:
        PicklingError: It cannot travel.
    """
    kind: Any = type(obj)
    if kind is memoryview:
        return _looking, _look_of(obj)
    if kind in _VIEWS:
        return methodcaller(_VIEWS[kind]), (gc.get_referents(obj)[0],)
    if kind is MappingProxyType:
        (shown,) = gc.get_referents(obj)
        return (MappingProxyType, (shown,)) if type(shown) is dict else None
    return None


def _property(function: Any, name: str | None) -> Any:
    found: Any = functools.cached_property(function)
    if name is not None:
        found.__set_name__(None, name)
    return found


def _cached(function: Any, how: dict[str, Any]) -> Any:
    return functools.lru_cache(**how)(function)


def _looking(whole: Any, start: int, stop: int, how: tuple[Any, ...]) -> memoryview:
    code, shape, is_readonly = how
    view = memoryview(whole).cast("B")[start:stop].cast(code, shape)
    return view.toreadonly() if is_readonly else view


def _look_of(view: memoryview) -> tuple[Any, ...]:
    """Return what `_looking` takes."""
    whole = view.obj
    if not view.c_contiguous or type(whole) not in (*BUFFERS, bytes, np.ndarray):
        text = "a memoryview with steps, or of something else than bytes and arrays, cannot travel"
        raise pickle.PicklingError(text)
    first = span_of_buffer(memoryview(whole).cast("B"))[0]
    start, stop = (at - first for at in span_of_buffer(view.cast("B")))
    return whole, start, stop, (view.format, view.shape, view.readonly)
