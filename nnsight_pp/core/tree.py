"""Walks over the values that modules take and return.

A value is a tensor, or a tuple, list, dict, dataclass or named tuple of values, or anything else,
which is a leaf. Containers are rebuilt; leaves are what the callback returns for them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.protocols import RemoteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with every leaf replaced by ``change(leaf)``.

    A container whose leaves all stay the same objects is still rebuilt, so that the result
    shares no mutable container with ``value``.
    """
    parts = children(value)
    if parts is None:
        return change(value)
    return rebuild(value, [map_leaves(part, change) for part in parts])


@final
class SharedMap:
    """`map_leaves` over several values: a container that stands in two places stays one.

    Args:
        change: Returns what stands in the place of a leaf.
        instead: By id: what stands in the place of an object, whatever it holds. The objects are
            kept alive elsewhere.
    """

    __slots__ = ("_change", "_instead", "_known", "has_others")

    def __init__(
        self, change: Callable[[Any], Any], instead: Mapping[int, Any] | None = None
    ) -> None:
        self._change = change
        self._instead = instead or {}
        # With each container itself, so that its id stays its own.
        self._known: dict[int, tuple[Any, Any]] = {}
        # Whether one is no plain container, and may hold more than its `children`.
        self.has_others = False

    def __call__(self, value: Any) -> Any:
        """Return ``value`` with its leaves changed.

        Raises:
            HoldsItselfError: A container in it holds itself.
        """
        if self._instead and id(value) in self._instead:
            return self._instead[id(value)]
        parts = children(value)
        if parts is None:
            return self._change(value)
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = value, _NOT_YET
            self.has_others = self.has_others or type(value) not in _PLAIN
            changed = rebuild(value, [self(part) for part in parts])
            self._known[id(value)] = value, changed
            return changed
        if known[1] is _NOT_YET:
            raise HoldsItselfError(type(value).__name__)
        return known[1]

    def changed_of(self, value: Any) -> Any:
        """Return what the container ``value`` has become, or None where it was not met."""
        known = self._known.get(id(value))
        return None if known is None or known[1] is _NOT_YET else known[1]


_NOT_YET = object()
_PLAIN = (list, dict, tuple)


class HoldsItselfError(ValueError):
    """A container holds itself, so it cannot be taken apart."""


def own_copy(leaf: Any) -> Any:
    """Return a copy of a tensor, and anything else as it is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def copied(value: Any) -> Any:
    """Return ``value`` with a copy of each of its tensors."""
    return map_leaves(value, own_copy)


def on_device(value: Any, device: torch.device) -> Any:
    """Return ``value``, which is on the CPU, with its tensors on ``device``.

    May be called by any thread: a copy from pageable memory has ended when it returns.
    """
    if device.type == "cpu":
        return value
    return map_leaves(
        value, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
    )


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of ``value`` in the order in which `map_leaves` meets them."""
    parts = children(value)
    if parts is None:
        yield value
    else:
        for part in parts:
            yield from leaves(part)


def children(value: Any) -> list[Any] | None:
    """Return what the container ``value`` holds, in order; None for a leaf."""
    # CAUTION: a remote value answers `isinstance` by moving bytes, so its type is asked.
    kind = type(value)
    if kind is torch.Tensor or value is None:  # nearly all of them
        return None
    if issubclass(kind, (torch.Tensor, RemoteValue)):
        return None
    if kind is tuple or kind is list or _is_named(kind):
        return list(value)
    if issubclass(kind, dict):
        return list(value.values())
    if dataclasses.is_dataclass(kind):
        return [getattr(value, name) for name in _set_fields(value)]
    return None


def rebuild(value: Any, parts: list[Any]) -> Any:
    """Return a container like ``value`` that holds ``parts`` in place of its `children`."""
    kind = type(value)
    if kind is list:
        return parts
    if kind is dict:
        return dict(zip(value, parts, strict=True))
    if issubclass(kind, tuple):
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if issubclass(kind, dict):
        return _rebuilt_mapping(value, parts)
    # Without calling `__init__`, which may check or derive.
    fresh = copy.copy(value)
    for name, part in zip(_set_fields(value), parts, strict=True):
        object.__setattr__(fresh, name, part)
    return fresh


def refill(value: Any, parts: list[Any]) -> Any:
    """Put ``parts`` in place of the `children` of a container; return it, but a new tuple."""
    kind = type(value)
    if issubclass(kind, tuple):
        return rebuild(value, parts)
    if kind is list:
        value[:] = parts
    elif issubclass(kind, dict):
        _fill_mapping(value, value, parts)
    else:
        for name, part in zip(_set_fields(value), parts, strict=True):
            object.__setattr__(value, name, part)
    return value


def _is_named(kind: type) -> bool:
    """Tell named tuples, and torch's own (``torch.return_types.max``), from other subclasses."""
    return issubclass(kind, tuple) and (
        hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")
    )


def _set_fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _rebuilt_mapping(value: dict[Any, Any], parts: list[Any]) -> Any:
    """Rebuild a dict of another class; transformers' ModelOutput is a dataclass as well."""
    fresh = copy.copy(value)
    _fill_mapping(fresh, value, parts)
    return fresh


def _fill_mapping(fresh: Any, value: dict[Any, Any], parts: list[Any]) -> None:
    # CAUTION: `dict`'s own method would bypass the order that an OrderedDict keeps.
    put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    fields = set(_set_fields(value)) if dataclasses.is_dataclass(value) else set()
    for key, part in zip(list(value), parts, strict=True):
        put(fresh, key, part)  # type: ignore[arg-type]
        if key in fields:
            object.__setattr__(fresh, key, part)
