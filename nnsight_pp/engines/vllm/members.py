"""What stands in an object, and what leads to it: the members of what came with a block.

A path is made on a rank (`outer`) and followed at the client (`homecoming`), from the copy of an
object to the object itself.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, final

import numpy as np

from nnsight_pp.core.meaning import all_codes
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.envoys.tree_node import TreeNode
from nnsight_pp.wire.odd_objects import ShownModule

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
# Never changed by a block, or the same on every side.
LEFT_ALONE = (*(Enum, ModuleType, CodeType, range, slice, np.generic, RemoteValue, TreeNode),)
# What these hold is found under names of Python's own.
_HELD: tuple[tuple[type, tuple[str, ...]], ...] = (
    (MethodType, ("__self__", "__func__")),
    (BuiltinFunctionType, ("__self__",)),
    (MethodWrapperType, ("__self__",)),
    (memoryview, ("obj",)),
    (functools.partial, ("func", "args", "keywords")),
    (FunctionType, ("__defaults__", "__kwdefaults__", "__dict__")),
    (functools._lru_cache_wrapper, ("__wrapped__",)),
    (defaultdict, ("default_factory",)),
)
HOLDERS = tuple(kind for kind, _ in _HELD)


@final
class Field(str):
    """The name of an attribute, in a path."""

    __slots__ = ()


@final
class Seen(str):
    """A name that a function sees from around itself, in a path."""

    __slots__ = ()


@final
class Nth(int):
    """Which value of a dict, in a path, where its key is an object of the rank's own."""

    __slots__ = ()


@final
class NthKey(int):
    """Which key of a dict, in a path."""

    __slots__ = ()


@final
class Hidden(int):
    """Which element of a set, in a path: nothing leads to it elsewhere."""

    __slots__ = ()


class Fields(dict[str, Any]):
    """The attributes of an object."""


class Around(dict[str, Any]):
    """The names that a function sees from around itself."""


def members_of(value: Any, was: Any) -> list[tuple[Any, Any]]:
    """Return what stands in ``value``, each with its place; ``was`` is what is known of it."""
    kind = type(value)
    if issubclass(kind, dict):
        found: list[tuple[Any, Any]] = []
        for at, (key, one) in enumerate(value.items()):
            found.append((key if is_text(key) else Nth(at), one))
            if not is_text(key):
                found.append((NthKey(at), key))
        return found + _held_by(value, defaultdict)
    if issubclass(kind, (list, tuple, deque)):
        return list(enumerate(value))
    found = []
    if type(was) is Fields:
        found += [(Field(name), member) for name, member in was.items()]
        if kind is not ShownModule:
            found.insert(0, (Field("__class__"), kind))
    elif type(was) is Around:
        found += [(Seen(name), member) for name, member in was.items()]
    elif issubclass(kind, type) and was is not None:
        methods = [(name, one) for name, one in vars(value).items() if type(one) is FunctionType]
        return [(Field(name), one) for name, one in methods]
    if kind is not FunctionType or was is not None:
        found += _held_by(value, HOLDERS)
    return found


def _held_by(value: Any, kinds: Any) -> list[tuple[Any, Any]]:
    held = (names for holder, names in _HELD if isinstance(value, holder))
    if not isinstance(value, kinds):
        return []
    return [(Field(name), getattr(value, name)) for names in held for name in names]


def member_at(one: Any, place: Any) -> Any:
    """Return what stands in ``one`` at ``place``.

    Raises:
        KeyError, IndexError, AttributeError: Nothing does.
    """
    if type(place) is Field:
        is_pythons = place == "__class__" or isinstance(one, HOLDERS)
        return getattr(one, place) if is_pythons else fields_of(one)[place]
    if type(place) is Nth:
        return list(one.values())[place]
    if type(place) is NthKey:
        return list(one)[place]
    return around_of(one)[place] if type(place) is Seen else one[place]


def around_of(function: FunctionType) -> Around:
    """Return what the names stand for that ``function`` takes from around itself."""
    names = {name for code in all_codes(function.__code__) for name in code.co_names}
    found = Around((name, one) for name, one in function.__globals__.items() if name in names)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:
            found.pop(name, None)  # not bound
    return found


def slots_of(kind: type) -> list[str]:
    """Return the names of the attributes that objects of ``kind`` have in slots."""
    found = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{one.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def has_fields(value: Any) -> bool:
    """Whether an object has attributes of its own, or may have."""
    return bool(slots_of(type(value))) or getattr(value, "__dict__", None) is not None


def fields_of(value: Any) -> Fields:
    """Return the attributes that an object has of its own."""
    if type(value) is ShownModule:
        return Fields(value.shown())
    found = Fields(getattr(value, "__dict__", ()))
    for name in slots_of(type(value)):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue  # not set
    return found


def is_text(key: Any) -> bool:
    """Whether a dict finds by ``key`` what it has under an equal one."""
    return type(key) in PLAIN or (type(key) is tuple and all(map(is_text, key)))
