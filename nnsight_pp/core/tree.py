"""Walks over the values that modules take and return.

A value is a tensor, or a tuple, list, dict, dataclass or named tuple of values, or anything else,
which is a leaf. Containers are rebuilt; leaves are what the callback returns for them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.protocols import RemoteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with every leaf replaced by ``change(leaf)``.

    A container whose leaves all stay the same objects is still rebuilt, so that the result
    shares no mutable container with ``value``.
    """
    kind = type(value)
    # CAUTION: a remote value answers `isinstance` by moving bytes, so its type is asked first.
    if issubclass(kind, (torch.Tensor, RemoteValue)):
        return change(value)
    if kind is tuple:
        return tuple([map_leaves(item, change) for item in value])
    if kind is list:
        return [map_leaves(item, change) for item in value]
    if kind is dict:
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[map_leaves(item, change) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    if isinstance(value, dict):
        return _map_mapping(value, change)
    return change(value)


def _map_dataclass(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a dataclass without calling its ``__init__``, which may check or derive."""
    fresh = object.__new__(type(value))
    if isinstance(value, dict):  # transformers' ModelOutput is both
        dict.update(fresh, {key: map_leaves(item, change) for key, item in value.items()})
        for field in dataclasses.fields(value):
            object.__setattr__(fresh, field.name, dict.get(fresh, field.name))
        return fresh
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            item = map_leaves(getattr(value, field.name), change)
            object.__setattr__(fresh, field.name, item)
    return fresh


def _map_mapping(value: dict[Any, Any], change: Callable[[Any], Any]) -> Any:
    fresh = type(value).__new__(type(value))
    for key, item in value.items():
        dict.__setitem__(fresh, key, map_leaves(item, change))
    return fresh


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of ``value`` in the order in which `map_leaves` meets them."""
    if issubclass(type(value), (torch.Tensor, RemoteValue)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from leaves(getattr(value, field.name))
    else:
        yield value
