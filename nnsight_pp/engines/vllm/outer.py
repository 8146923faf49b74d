"""Objects from around a block: how the block changed them on a rank, and the same change at home.

A block works on a copy that came with its request. What it appended, assigned or edited is told
from the copy as it was before, shipped with the report, and made on the user's own object.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_pp.core.protocols import RemoteValue


def is_outer(value: Any) -> bool:
    """Whether ``value`` is an object whose changes a block brings home."""
    return type(value) in (list, dict, set) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    # CAUTION: a lazy value answers `isinstance` by moving bytes, so its type is asked.
    return not issubclass(type(value), RemoteValue) and isinstance(value, torch.Tensor)


def copies_of(names: dict[str, Any]) -> dict[str, Any]:
    """Return what is needed to tell later how the block changed objects from around it."""
    found: dict[str, Any] = {}
    for name, value in names.items():
        if _is_tensor(value):
            found[name] = (value, value._version)
        elif type(value) in (list, dict, set):
            found[name] = value.copy()
    return found


def change_of(before: Any, after: Any) -> Any:
    """Return how a list, dict, set or tensor has changed, or None.

    A list: ``("list", {index: item}, tail)``, or ``("list=", items)`` when it got shorter.
    """
    if isinstance(after, torch.Tensor):
        return ("tensor", after) if after._version != before[1] else None
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


def apply_change(target: Any, change: Any) -> None:
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
