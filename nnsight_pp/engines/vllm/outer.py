"""Objects from around a block: how the block changed them on a rank, and the same change at home.

A block works on a copy that came with its request. What it appended, assigned or edited is told
from the copy as it was before, shipped with the report, and made on the user's own object. One that
stands in another (in a list or dict, as an attribute) is named by its path there, as that was when
the block began.

Objects with attributes are looked into, those of torch's modules too, and the user's functions with
the names that they see; not what the model or its libraries own. An object of a library that says
itself what is pickled of it (an iterator, a table) cannot be looked into: where it is another one
after the block, that is refused. Generators of random numbers come home where they stand. Of
tensors and arrays a checksum is kept, not a copy: a write through `.data` or `.numpy()` is not in
a tensor's version. `homecoming` makes the changes at home.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
import zlib
from collections import deque
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nnsight_pp.core.kept import FromHome
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.engines.vllm.members import (
    HOLDERS,
    LEFT_ALONE,
    PLAIN,
    Field,
    Fields,
    Hidden,
    around_of,
    fields_of,
    has_fields,
    is_text,
    members_of,
)
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.wire.block_codec import is_users
from nnsight_pp.wire.odd_objects import ShownModule

if TYPE_CHECKING:
    from nnsight_pp.core.growth import Growth


def _is_tensor(value: Any) -> bool:
    # CAUTION: a lazy value answers `isinstance` by moving bytes, so its type is asked.
    return not issubclass(type(value), RemoteValue) and isinstance(value, torch.Tensor)


# Of torch's own objects, those that hold what changes.
_LOOKED_INTO = (
    *(torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    torch.amp.grad_scaler.GradScaler,
)
# What these hold is the model's, or a stand-in for it.
_PACKAGES = frozenset({__name__.partition(".")[0], "vllm", "transformers", "tokenizers", "torch"})


# They may have attributes beside what they hold.
_CONTENT = (list, dict, set, deque, bytearray, torch.Tensor, np.ndarray)


class Before(NamedTuple):
    """One object as it was before the block.

    Attributes:
        path: What leads to it from what the name stands for: indices, keys, `Nth` values,
            `Field`s and names that a function has `Seen`.
        now: The object, which the block may change.
        was: A copy of what is compared, or the checksum of a tensor or an array.
        kind: Its class.
    """

    path: tuple[Any, ...]
    now: Any
    was: Any
    kind: type


def states_of(names: dict[str, Any], known: set[int]) -> dict[str, list[Before]]:
    """Return what is needed to tell later how the block changed objects from around it.

    Args:
        names: What the block sees.
        known: The ids of objects that are told of elsewhere; those of these names come in.

    Cost: a look at each member of each container and object in ``names``.
    """
    found: dict[str, list[Before]] = {}
    hidden: list[tuple[str, Any, Any]] = []
    for name, value in names.items():
        if name != "__builtins__":
            found[name] = states = []
            hidden += [(name, *one) for one in _note(value, (), known, states)]
    # Last, as another name may lead to them.
    for name, path, value in hidden:
        _note(value, path, known, found[name])
    return {name: states for name, states in found.items() if states}


def home_of(trace: str, before: dict[str, list[Before]]) -> list[tuple[FromHome, Any]]:
    """Return each object that came with the block of ``trace``, with what stands for it."""
    return [
        (FromHome(trace, name, one.path), one.now)
        for name, states in before.items()
        for one in states
        if not _is_hidden(one)
    ]


def moved_in(before: dict[str, list[Before]]) -> set[int]:
    """Return the ids of the tensors that show another memory than before the block."""
    every = (one for states in before.values() for one in states)
    contents = ((one.now, one.was) for one in every if isinstance(one.was, _Content))
    return {id(now) for now, was in contents if was.place and was.place != _place_of(now)}


def _is_hidden(one: Before) -> bool:
    return any(type(place) is Hidden for place in one.path)


def _note(
    value: Any, path: tuple[Any, ...], known: set[int], states: list[Before]
) -> list[tuple[tuple[Any, ...], Any]]:
    """Note ``value`` and what stands in it; return the elements of sets, with their paths."""
    kind = type(value)
    if kind in PLAIN or id(value) in known:
        return []
    if issubclass(kind, LEFT_ALONE) and kind is not ShownModule:
        return []
    known.add(id(value))
    was = _state(value, kind)
    if was is not None:
        states.append(Before(path, value, was, kind))
    members = members_of(value, was)
    if issubclass(kind, _CONTENT) and type(getattr(value, "__dict__", None)) is dict:
        # What the user's own kind of a list has beside its items, and what is set on a tensor.
        beside = Fields(value.__dict__)
        states.append(Before(path, value, beside, kind))
        members += [(Field(name), member) for name, member in beside.items()]
    found: list[tuple[tuple[Any, ...], Any]] = []
    if issubclass(kind, (set, frozenset)):
        found = [((*path, Hidden(at)), one) for at, one in enumerate(value)]
    for place, member in members:
        if type(member) not in PLAIN:
            found += _note(member, (*path, place), known, states)
    return found


class _Content(NamedTuple):
    """What a tensor or an array holds, but for which of 4 billion contents it is.

    ``flag`` says whether a tensor of its own wants a gradient, and whether an array may be written;
    ``place`` which memory a tensor shows, and how.
    """

    shape: tuple[int, ...]
    dtype: Any
    version: int
    checksum: int
    grad: Any = None
    flag: bool = False
    place: Any = None


class _Pickled(bytes):
    """What is pickled of an object."""


def _state(value: Any, kind: type) -> Any:
    """Return what tells later whether ``value`` has changed; None where nothing can be told."""
    if issubclass(kind, torch.Tensor):
        return _content_of_tensor(value)
    if issubclass(kind, type):
        return _pickled(value) if is_of_the_user(value) else None
    if issubclass(kind, np.ndarray) and not value.dtype.hasobject:
        return _content_of_array(value)
    if issubclass(kind, (list, dict, set, deque, bytearray, np.ndarray)):
        return value.copy()
    if issubclass(kind, FunctionType):
        return around_of(value) if is_of_the_user(value) else None
    if issubclass(kind, (tuple, frozenset, *HOLDERS)):
        return None
    if kind is ShownModule:
        return fields_of(value)
    package = kind.__module__.partition(".")[0]
    if package in _PACKAGES and not issubclass(kind, (*_LOOKED_INTO, torch.Generator)):
        return None
    is_known = issubclass(kind, (SimpleNamespace, *_LOOKED_INTO)) or is_of_the_user(kind)
    if _pickles_itself(kind) and not is_known:
        return _pickled(value)
    return fields_of(value) if has_fields(value) else _pickled(value)


def _content_of_tensor(value: torch.Tensor) -> _Content:
    checksum, place = 0, None
    if value.layout is torch.strided and not value.is_meta:
        # Not a copy, where it lies in this process in one piece.
        whole = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        checksum = zlib.crc32(whole.view(-1).view(torch.uint8).numpy())
        place = _place_of(value)
    grad = value.grad if value.is_leaf else None
    of_grad = None if grad is None else _content_of_tensor(grad)._replace(place=None)
    flag = value.is_leaf and value.requires_grad
    known = value._version, checksum, of_grad, flag, place
    return _Content(tuple(value.shape), value.dtype, *known)


def _place_of(value: torch.Tensor) -> Any:
    return value.data_ptr(), value.stride()


def _content_of_array(value: Any) -> _Content:
    is_plain = type(value) is np.ndarray and value.flags.c_contiguous and value.dtype.itemsize
    data = value.reshape(-1).view(np.uint8) if is_plain else value.tobytes()
    flag = bool(value.flags.writeable)
    return _Content(value.shape, value.dtype, 0, zlib.crc32(data), None, flag)


def is_of_the_user(kind: Any) -> bool:
    """Whether a class or a function is of the user's own code."""
    module = sys.modules.get(kind.__module__)
    return module is None or kind.__module__ == "__main__" or is_users(module)


def _pickles_itself(kind: Any) -> bool:
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(kind, name) is not getattr(object, name) for name in names)


def _pickled(value: Any) -> _Pickled | None:
    """Return what is pickled of an object; of a class, what its data attributes are."""
    if issubclass(type(value), type):
        value = {
            name: one
            for name, one in vars(value).items()
            if not name.startswith("__") and not callable(one) and not _is_descriptor(type(one))
        }
    try:
        return _Pickled(pickle.dumps(value))
    except Exception:  # it came in another way, as a class or function does
        return None


def _is_descriptor(kind: type) -> bool:
    return any("__get__" in one.__dict__ for one in kind.__mro__)


def change_of(
    states: list[Before], growth: Growth | None = None
) -> list[tuple[tuple[Any, ...], Any]]:
    """Return how the objects behind one name have changed: the path of each, and its change.

    Args:
        states: The objects as they were.
        growth: When what is new in lists and dicts was put there; it comes last in their changes.

    Raises:
        NotSupportedError: One has changed that cannot be brought home.
    """
    found = []
    for one in states:
        change = _change(one.was, one.now)
        if type(one.now) is not one.kind or (change is not None and _is_hidden(one)):
            raise unknown(one.now)
        if change is not None:
            if growth is not None and change[0] in ("list", "dict"):
                change = (*change, growth.of(one.now))
            found.append((one.path, change))
    return found


def _change(before: Any, after: Any) -> Any:
    """Return how an object has changed, or None.

    A list: ``("list", {index: item}, tail)``, or ``("list=", items)`` when it got shorter. A
    tensor: ``("tensor", [itself], [its gradient], [whether it wants one], whether it shows another
    memory than before)``, a list being empty where that is the same.
    """
    if isinstance(before, _Content):
        return _change_of_content(before, after)
    if type(before) is Fields:
        changed, gone = _changed(before, fields_of(after))
        return ("fields", changed, gone) if changed or gone else None
    if isinstance(after, list):
        if len(after) < len(before):
            return ("list=", list(after))
        slots = {
            index: after[index] for index, item in enumerate(before) if after[index] is not item
        }
        tail = after[len(before) :]
        return ("list", slots, list(tail)) if slots or tail else None
    if isinstance(after, dict):
        changed, gone = _changed(before, after)
        order = _order(before, after)
        # As pairs: a key may be an object that has come from home, such as a parameter.
        changes = ("dict", list(changed.items()), gone, order)
        return changes if changed or gone or order else None
    if isinstance(after, set):
        return _change_of_set(before, after)
    if isinstance(after, deque):
        is_same = len(after) == len(before) and all(map(operator.is_, after, before))
        return None if is_same else ("items", list(after))
    if isinstance(after, bytearray):
        return ("list=", bytes(after)) if after != before else None
    if isinstance(after, np.ndarray):
        return _change_of_array(before, after)
    if type(before) is _Pickled:
        return None if _pickled(after) in (before, None) else ("drawn", _state_of_drawing(after))
    changed, gone = _changed(before, around_of(after))
    return ("around", changed, gone) if changed or gone else None


def _order(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    """Return the keys of ``after`` where they are not those of ``before`` and then the new ones."""
    usual = [*(key for key in before if key in after), *(key for key in after if key not in before)]
    return [] if all(map(_is_same_key, usual, after)) else list(after)


def _is_same_key(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and is_text(one) and one == other)


def _change_of_set(before: set[Any], after: set[Any]) -> Any:
    """Return how a set has changed: what was added and removed, or all that it holds."""
    removed, added = before - after, after - before
    if not removed and not added:
        is_same = set(map(type, before)) == set(map(type, after))
        return None if is_same else ("set=", sorted(after, key=repr))
    if not all(map(is_text, removed)):
        return "set=", sorted(after, key=repr)
    return "set", sorted(added, key=repr), sorted(removed, key=repr)


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return what is new or another one, and the keys of what is gone."""
    changed = {
        key: value for key, value in after.items() if key not in before or before[key] is not value
    }
    return changed, [key for key in before if key not in after]


def _change_of_content(before: _Content, after: Any) -> Any:
    is_tensor = isinstance(after, torch.Tensor)
    if (before.shape, before.dtype) != (tuple(after.shape), after.dtype):
        raise unknown(after)
    now = _content_of_tensor(after) if is_tensor else _content_of_array(after)
    if now == before:
        return None
    if not is_tensor and now.flag != before.flag:
        raise unknown(after)
    if not is_tensor:
        return ("array", after)
    elements = [] if now._replace(grad=before.grad, flag=before.flag) == before else [after]
    grads = [] if now.grad == before.grad else [after.grad]
    flags = [] if now.flag == before.flag else [now.flag]
    return ("tensor", elements, grads, flags, now.place != before.place)


def _change_of_array(before: Any, after: Any) -> Any:
    """Return how an array of objects has changed."""
    if before.shape != after.shape or before.dtype != after.dtype:
        raise unknown(after)
    return None if all(map(operator.is_, before.flat, after.flat)) else ("array", after)


def _state_of_drawing(value: Any) -> Any:
    """Return where a generator of random numbers stands; of another object nothing is known."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, torch.Generator):
        return value.get_state()
    raise unknown(value)


def unknown(value: Any) -> NotSupportedError:
    """Return the error for a change of ``value`` that cannot be brought home."""
    is_class = issubclass(type(value), type)
    kind, what = (value, "The class") if is_class else (type(value), "A")
    what += f" {kind.__module__}.{kind.__qualname__}"
    return NotSupportedError(
        explain(
            f"{what} from around the block was changed by it.",
            why="The block has worked on a copy, and this change cannot be brought home.",
            todo="Make the object inside the block, or save what comes of it; set attributes of an "
            "object, not of its class.",
        )
    )
