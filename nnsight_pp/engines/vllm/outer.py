"""Objects from around a block: how the block changed them on a rank, and the same change at home.

A block works on a copy that came with its request. What it appended, assigned or edited is told
from the copy as it was before, shipped with the report, and made on the user's own object. One that
stands in a list, dict or tuple is named by its path there, as that was when the block began.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nnsight_pp.core.protocols import RemoteValue


def is_outer(value: Any) -> bool:
    """Whether ``value`` is an object whose changes a block brings home."""
    return type(value) in (list, dict, set) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    # CAUTION: a lazy value answers `isinstance` by moving bytes, so its type is asked.
    return not issubclass(type(value), RemoteValue) and isinstance(value, torch.Tensor)


_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})


class Before(NamedTuple):
    """One object as it was before the block.

    Attributes:
        path: The indices and keys that lead to it, from what the name stands for.
        now: The object, which the block may change.
        was: A copy of a container, the version of a tensor.
    """

    path: tuple[Any, ...]
    now: Any
    was: Any


def states_of(names: dict[str, Any], known: set[int]) -> dict[str, list[Before]]:
    """Return what is needed to tell later how the block changed objects from around it.

    Args:
        names: What the block sees.
        known: The ids of objects that are told of elsewhere; those of these names come in.

    Cost: a look at each member of each list, dict and tuple in ``names``.
    """
    found = {}
    for name, value in names.items():
        states: list[Before] = []
        _note(value, (), known, states)
        if states:
            found[name] = states
    return found


def _note(value: Any, path: tuple[Any, ...], known: set[int], states: list[Before]) -> None:
    kind = type(value)
    if kind in (list, dict, tuple):
        if id(value) in known:
            return
        known.add(id(value))
        if kind is not tuple:
            states.append(Before(path, value, value.copy()))
        for place, member in value.items() if kind is dict else enumerate(value):
            if type(member) not in _PLAIN:
                _note(member, (*path, place), known, states)
    elif (kind is set or _is_tensor(value)) and id(value) not in known:
        known.add(id(value))
        states.append(Before(path, value, value.copy() if kind is set else value._version))


def change_of(states: list[Before]) -> list[tuple[tuple[Any, ...], Any]]:
    """Return how the objects behind one name have changed: the path of each, and its change."""
    changes = ((one.path, _change(one.was, one.now)) for one in states)
    return [(path, change) for path, change in changes if change is not None]


def _change(before: Any, after: Any) -> Any:
    """Return how a list, dict, set or tensor has changed, or None.

    A list: ``("list", {index: item}, tail)``, or ``("list=", items)`` when it got shorter.
    """
    if isinstance(after, torch.Tensor):
        return ("tensor", after) if after._version != before else None
    if isinstance(after, list):
        if len(after) < len(before):
            return ("list=", list(after))
        slots = {
            index: after[index] for index, item in enumerate(before) if after[index] is not item
        }
        tail = after[len(before) :]
        return ("list", slots, tail) if slots or tail else None
    if isinstance(after, dict):
        changed = {
            key: value
            for key, value in after.items()
            if key not in before or before[key] is not value
        }
        gone = [key for key in before if key not in after]
        return ("dict", changed, gone) if changed or gone else None
    return ("set", sorted(after, key=repr)) if after != before else None


def located(target: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> list[tuple[Any, Any]]:
    """Return the client's objects behind ``target`` that have changed, each with its change.

    Call it for all names before anything is changed: a change may move what another path leads to.
    """
    found = []
    for path, change in changes:
        one = target
        for place in path:
            one = one[place]
        found.append((one, change))
    return found


def make_change(target: Any, change: Any) -> None:
    """Make on the client's object the change that a block made on a rank's copy of it."""
    kind, *parts = change
    if kind == "tensor":
        with torch.no_grad():
            target.copy_(parts[0])
    elif kind == "list=":
        target[:] = parts[0]
    elif kind == "list":
        for index, item in parts[0].items():
            target[index] = item
        target.extend(parts[1])
    elif kind == "dict":
        target.update(parts[0])
        for key in parts[1]:
            target.pop(key, None)
    else:
        target.clear()
        target.update(parts[0])
