"""Which objects a block may change or look at: what its text does, and the functions that it calls.

Objects are known by their ids, tensors and arrays by their memory. What no text tells (a method
of an object in an object, code without a source) is left to `conflicts`, which looks at what the
blocks have changed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import random
import textwrap
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.touches import Uses, touches_of
from nnsight_pp.engines.vllm.members import fields_of, has_fields
from nnsight_pp.engines.vllm.outer import is_of_the_user
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.interleave.barrier import Barrier
from nnsight_pp.trace.tracer import BlockTracer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nnsight_pp.wire.block_codec import BlockMessage

# Of these a block changes nothing that another one could see, or they are no object of the user's.
_CONSTANT = (
    int, float, complex, str, bytes, type(None), type, range,
    BuiltinFunctionType, ModuleType, Envoy, BlockTracer, Barrier, RemoteValue,
)  # fmt: skip
_CONTAINERS = (list, dict, set, tuple)
# Whoever uses one changes it.
_DRAWING = (
    torch.Generator, random.Random, np.random.Generator, np.random.RandomState,
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
# What two blocks put into one of these is put together at home.
_ADDED_UP = (list, dict, set)
_LOOKED_INTO = (SimpleNamespace, torch.nn.Module)


@final
class Touched:
    """The objects that a block may touch, by `key_of`.

    Attributes:
        put: Those that it may change.
        strict: Those of them that only one block can change.
        seen: Those that it may look at.
    """

    def __init__(
        self, uses: Uses, names: Mapping[str, Any], reached: dict[int, dict[Any, Any]] | None = None
    ) -> None:
        self.put: set[Any] = set()
        self.strict: set[Any] = set()
        self.seen: set[Any] = set()
        self._known: set[Any] = set()
        # By id: what was found to stand in the objects, which several blocks may name.
        self._of = {} if reached is None else reached
        self._touch(uses, names)

    @classmethod
    def of(cls, message: BlockMessage) -> Touched:
        """Return what the block of ``message`` may touch."""
        return cls(message.block.uses(), message.names)

    def shared_with(self, other: Touched) -> set[Any]:
        """Return what one of two blocks may change and the other may look at, or undo."""
        looked_at = (self.seen & other.put) | (other.seen & self.put)
        return looked_at | (self.strict & other.strict)

    def _reached(self, value: Any) -> dict[Any, Any]:
        found = self._of.get(id(value))
        if found is None:
            found = self._of[id(value)] = dict(_reached(value))
        return found

    def _touch(self, uses: Uses, names: Mapping[str, Any]) -> None:
        for name, value in names.items():
            if issubclass(type(value), RemoteValue):
                continue  # a block may not change what a session keeps
            whole = self._reached(value)
            inner = {key: one for key, one in whole.items() if one is not value}
            if name in uses.put and not isinstance(value, _CONSTANT):
                self._change({key_of(value): value})
            if name in uses.below:
                self._change(inner)
            if name in uses.handed and isinstance(value, _CONTAINERS):
                self._change({k: one for k, one in whole.items() if isinstance(one, _CONTAINERS)})
            if name in uses.seen:
                self.seen |= whole.keys()
            drawing = {key: one for key, one in whole.items() if isinstance(one, _DRAWING)}
            self._change(drawing)
            self.seen |= drawing.keys()
            for one in whole.values():
                self._call(one)
        for name, method in uses.put_by:
            value = names.get(name)
            # What a method of the user's own does is told by its text.
            is_told = _method_of(value, method) is not None
            if name in names and not is_told and not isinstance(value, _CONSTANT):
                self._change({key_of(value): value})
        for name, method in uses.called:
            self._call_method(names.get(name), method)

    def _change(self, found: Mapping[Any, Any]) -> None:
        self.put |= found.keys()
        self.strict |= {key for key, one in found.items() if type(one) not in _ADDED_UP}

    def _call_method(self, value: Any, method: str) -> None:
        function = getattr(type(value), method, None)
        if type(function) is FunctionType and (method, id(value)) not in self._known:
            self._known.add((method, id(value)))
            first = function.__code__.co_varnames[:1]
            self._call(function, {} if not first else {first[0]: value})

    def _call(self, function: Any, given: Mapping[str, Any] | None = None) -> None:
        """Note what a function of the user may touch around itself, and of what it is ``given``."""
        if type(function) is MethodType:
            self._call_method(function.__self__, function.__name__)
        if type(function) is not FunctionType or not is_of_the_user(function):
            return
        if given is None and id(function) in self._known:
            return
        self._known.add(id(function))
        uses = _uses_of_function(function.__code__)
        around = {**_around(function), **(given or {})}
        for name, place in _places(function):
            self.seen.add(place)
            if uses is None or name in uses.bound:
                self.put.add(place)
                self.strict.add(place)
        for one in (function.__defaults__, function.__kwdefaults__, vars(function)):
            found = self._reached(one)
            self._change({k: one for k, one in found.items() if isinstance(one, _CONTAINERS)})
        if uses is not None:
            self._touch(uses, around)
            return
        for value in around.values():
            self._change(self._reached(value))
            self.seen |= self._reached(value).keys()


def _method_of(value: Any, name: str) -> FunctionType | None:
    """Return the function of the user's that ``value.name()`` calls; None for any other."""
    kind = type(value)
    found = getattr(kind, name, None)
    if found is None and has_fields(value) and not issubclass(kind, RemoteValue):
        found = fields_of(value).get(name)
    return found if type(found) is FunctionType and is_of_the_user(found) else None


def leads_to(value: Any, keys: set[Any]) -> bool:
    """Whether one of the objects of ``keys`` is ``value``, or stands in it."""
    return any(key in keys for key, _ in _reached(value))


def key_of(value: Any) -> Any:
    """Return what an object is known by: a tensor or an array by the memory that it shows."""
    try:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return "memory", value.untyped_storage().data_ptr() or id(value)
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            return "memory", value.__array_interface__["data"][0]
    except (NotImplementedError, RuntimeError):  # it has no memory of its own
        return id(value)
    return id(value)


def _reached(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield ``value`` and what stands in it, each with its key; not what a function sees."""
    known: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        # CAUTION: a remote value answers `isinstance` by moving bytes.
        if issubclass(type(one), _CONSTANT) or id(one) in known:
            continue
        known.add(id(one))
        if type(one) not in (tuple, frozenset):
            yield key_of(one), one
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)) or type(one).__name__ == "deque":
            waiting += one
        elif isinstance(one, functools.partial):
            waiting += [one.func, one.args, one.keywords]
        elif isinstance(one, MethodType):
            waiting.append(one.__self__)
        elif isinstance(one, _LOOKED_INTO) or (has_fields(one) and is_of_the_user(type(one))):
            waiting += fields_of(one).values()


def _around(function: FunctionType) -> dict[str, Any]:
    found = inspect.getclosurevars(function)
    return {**found.globals, **found.nonlocals}


def _places(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function may bind around itself, with what each place is known by."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield name, id(cell)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, (id(function.__globals__), name)


@functools.lru_cache(maxsize=1024)
def _uses_of_function(code: Any) -> Uses | None:
    """Return what the text of ``code`` does with the names around it; None without a text."""
    try:
        return touches_of(ast.parse(textwrap.dedent(inspect.getsource(code))))
    except (OSError, SyntaxError, TypeError):
        return None
