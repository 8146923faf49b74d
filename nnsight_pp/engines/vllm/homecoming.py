"""The changes that a block has made to objects from around it, made on the user's own.

`outer` tells them on the rank.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nnsight_pp.core.kept import FromHome
from nnsight_pp.core.tree import SharedMap, leaves
from nnsight_pp.engines.vllm.members import member_at, slots_of
from nnsight_pp.engines.vllm.outer import unknown
from nnsight_pp.errors import NotSupportedError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.report import Report
    from nnsight_pp.wire.block_codec import BlockMessage


def located(target: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> list[tuple[Any, Any]]:
    """Return the client's objects behind ``target`` that have changed, each with its change.

    Call it for all names before anything is changed: a change may move what another path leads to.
    """
    found = [(_object_at(target, path), change) for path, change in changes]
    for one, change in found:
        if change[0] == "tensor" and change[2] and not one.is_leaf:
            raise _no_leaf(one)
    return found


def _no_leaf(tensor: torch.Tensor) -> NotSupportedError:
    return NotSupportedError(
        explain(
            f"A gradient flowed to a tensor of shape {list(tensor.shape)} from around the block, "
            "which is computed from others.",
            why="On the ranks it stands without what it was computed from, so the gradient ends "
            "there.",
            todo="Compute it inside the block, or `.detach()` it before the `with`.",
        )
    )


def _object_at(target: Any, path: tuple[Any, ...]) -> Any:
    for place in path:
        try:
            target = member_at(target, place)
        except (KeyError, IndexError, AttributeError) as error:  # made when the copy was unpickled
            raise unknown(target) from error
    return target


def at_home(
    messages: Sequence[BlockMessage | None], reports: dict[str, list[Report]]
) -> dict[str, list[Report]]:
    """Return ``reports`` with the client's own objects where the ranks had their copies of them.

    Call it before any of these is changed.

    Args:
        messages: The blocks, with what their names stand for.
        reports: What came back of them, by request.
    """
    names_of = {one.trace: one.names for one in messages if one is not None}

    def own(leaf: Any) -> Any:
        if type(leaf) is not FromHome:
            return leaf
        return _object_at(names_of[leaf.trace][leaf.name], leaf.path)

    every = [(one.saved, one.grown) for found in reports.values() for one in found]
    if not any(type(leaf) is FromHome for leaf in leaves(every)):
        return reports
    # What is one container in several places stays one.
    swap = SharedMap(own)
    return {
        trace: [replace(one, saved=swap(one.saved), grown=swap(one.grown)) for one in found]
        for trace, found in reports.items()
    }


def make_change(target: Any, change: Any) -> None:
    """Make on the client's object the change that a block made on a rank's copy of it."""
    kind, *parts = change
    if kind == "tensor":
        _set_tensor(target, *parts)
    elif kind == "array":
        target[...] = parts[0]
    elif kind == "list=":
        target[:] = parts[0]
    elif kind == "list":
        for index, item in parts[0].items():
            target[index] = item
        target.extend(parts[1])
    elif kind == "dict":
        for key, item in parts[0]:  # a counter's `update` would add
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


def _set_tensor(target: torch.Tensor, elements: list[Any], grads: list[Any]) -> None:
    with torch.no_grad():
        for one in elements:
            target.copy_(one)
        for grad in grads:
            if grad is None or target.grad is None or target.grad.shape != grad.shape:
                target.grad = grad
            else:
                target.grad.copy_(grad)


def _go_on_drawing(target: Any, state: Any) -> None:
    """Let a generator of random numbers go on where the rank's copy of it has stopped."""
    if isinstance(target, np.random.Generator):
        target.bit_generator.state = state
    elif isinstance(target, (torch.Generator, np.random.RandomState)):
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
