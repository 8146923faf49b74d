"""The changes that a block has made to objects from around it, made on the user's own.

`outer` tells them on the rank.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from nnsight_pp.engines.vllm.outer import Field, Seen, around_of, fields_of, slots_of, unknown


def located(target: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> list[tuple[Any, Any]]:
    """Return the client's objects behind ``target`` that have changed, each with its change.

    Call it for all names before anything is changed: a change may move what another path leads to.
    """
    found = []
    for path, change in changes:
        one = target
        for place in path:
            try:
                one = _member(one, place)
            except (
                KeyError,
                IndexError,
                AttributeError,
            ) as error:  # made when the copy was unpickled
                raise unknown(one) from error
        found.append((one, change))
    return found


def _member(one: Any, place: Any) -> Any:
    if type(place) is Field:
        is_named = place == "__class__" or isinstance(one, MethodType)
        return getattr(one, place) if is_named else fields_of(one)[place]
    return around_of(one)[place] if type(place) is Seen else one[place]


def make_change(target: Any, change: Any) -> None:
    """Make on the client's object the change that a block made on a rank's copy of it."""
    kind, *parts = change
    if kind == "tensor":
        with torch.no_grad():
            target.copy_(parts[0])
    elif kind == "array":
        target[...] = parts[0]
    elif kind == "list=":
        target[:] = parts[0]
    elif kind == "list":
        for index, item in parts[0].items():
            target[index] = item
        target.extend(parts[1])
    elif kind == "dict":
        for key, item in parts[0].items():  # a counter's `update` would add
            target[key] = item
        for key in parts[1]:
            target.pop(key, None)
    elif kind == "fields":
        _set_fields(target, *parts)
    elif kind == "around":
        _set_around(target, *parts)
    elif kind == "drawn":
        _go_on_drawing(target, parts[0])
    else:
        target.clear()
        target.extend(parts[0]) if kind == "items" else target.update(parts[0])


def _go_on_drawing(target: Any, state: Any) -> None:
    """Let a generator of random numbers go on where the rank's copy of it has stopped."""
    if isinstance(target, np.random.Generator):
        target.bit_generator.state = state
    elif isinstance(target, torch.Generator):
        target.set_state(state)
    else:
        target.setstate(state)


def _set_fields(target: Any, changed: dict[str, Any], gone: list[str]) -> None:
    """Set and remove attributes as they were found: past properties, also of what is frozen."""
    own, slots = getattr(target, "__dict__", {}), slots_of(type(target))
    for name, value in changed.items():
        if name in slots:
            object.__setattr__(target, name, value)
        else:
            own[name] = value
    for name in gone:
        if name in slots:
            object.__delattr__(target, name)
        else:
            own.pop(name, None)


def _set_around(target: FunctionType, changed: dict[str, Any], gone: list[str]) -> None:
    """Bind and unbind names that a function sees from around itself."""
    cells = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
    for name, value in changed.items():
        if name in cells:
            cells[name].cell_contents = value
        else:
            target.__globals__[name] = value
    for name in gone:
        if name in cells:
            del cells[name].cell_contents
        else:
            target.__globals__.pop(name, None)
