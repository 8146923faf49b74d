"""The changes that a block has made to objects from around it, made on the user's own.

`outer` tells them on the rank.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nnsight_pp.engines.vllm.members import member_at, slots_of
from nnsight_pp.engines.vllm.outer import unknown
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.wire.shared_memory import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.kept import FromHome
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


def own_of(messages: Sequence[BlockMessage]) -> Callable[[FromHome], Any]:
    """Return what finds the client's own object for what stands for it in reports.

    Call that before any of these objects is changed.

    Args:
        messages: The blocks, with what their names stand for.
    """
    names_of = {one.trace: one.names for one in messages}

    def own(word: FromHome) -> Any:
        found = _object_at(names_of[word.trace][word.name], word.path)
        return found if word.look is None else shown(found, word.look)

    return own


def make_change(target: Any, change: Any) -> None:
    """Make on the client's object the change that a block made on a rank's copy of it."""
    kind, *parts = change
    _CHANGES[kind](target, *parts)


def _set_all(target: Any, items: Any) -> None:
    target[:] = items


def _set_array(target: Any, elements: Any) -> None:
    target[...] = elements


def _set_items(target: list[Any], slots: dict[int, Any], tail: list[Any], _: Any = None) -> None:
    for index, item in slots.items():
        target[index] = item
    target.extend(tail)


def _set_keys(
    target: Any, changed: list[Any], gone: list[Any], order: list[Any], _: Any = None
) -> None:
    for key, item in changed:  # a counter's `update` would add
        target[key] = item
    for key in gone:
        target.pop(key, None)
    if order:
        items = [(key, target[key]) for key in order]
        target.clear()
        _set_keys(target, items, [], [])


def _set_elements(target: set[Any], added: list[Any], removed: list[Any]) -> None:
    target.update(added)
    target.difference_update(removed)


def _refill(target: Any, items: list[Any]) -> None:
    target.clear()
    target.update(items) if isinstance(target, set) else target.extend(items)


def _set_tensor(
    target: torch.Tensor,
    elements: list[Any],
    grads: list[Any],
    flags: list[bool],
    is_moved: bool = False,
) -> None:
    for flag in flags:
        target.requires_grad_(flag)
    with torch.no_grad():
        for one in elements:
            if is_moved:
                target.data = one
            else:
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


# By what `outer` calls a change.
_CHANGES: dict[str, Callable[..., None]] = {
    "tensor": _set_tensor,
    "array": _set_array,
    "list=": _set_all,
    "list": _set_items,
    "dict": _set_keys,
    "set": _set_elements,
    "set=": _refill,
    "items": _refill,
    "fields": _set_fields,
    "around": _set_around,
    "drawn": _go_on_drawing,
}
