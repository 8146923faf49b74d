"""The weights of an engine outside of any block: read, and edited between runs.

`model.model.norm.weight` is an `EngineWeight` then. Its shape is known here; a line that needs data
brings it, whole, from the ranks; indices are applied there. An edit in place is sent as what it is,
and made by every rank on the whole weight, of which it keeps its part (`shards`). What torch gives
back as a view of a weight is one as well, so an edit through it lands. The edit stays, as it does
on a model in this process; the next start of the engine loads the checkpoint again.

An engine is edited when it is idle: a step is shared, so a request would otherwise run with the old
weight and the new one. What was cached of prompts is forgotten.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch

from nnsight_pp.core.tree import leaves, map_leaves
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.parallel.class_check import is_asked_by_python
from nnsight_pp.parallel.operators import edited_by, give_operators
from nnsight_pp.parallel.pulled import DRAWING, real
from nnsight_pp.parallel.stand_in import StandIn, method_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.engines.vllm.rank_weights import RankWeights
    from nnsight_pp.engines.vllm.shards import Step

# What is told of a weight without its data.
_FACTS = frozenset(
    [
        *("shape", "dtype", "ndim", "size", "numel", "nelement", "dim", "ndimension", "stride"),
        *("element_size", "itemsize", "nbytes", "layout", "requires_grad", "is_leaf"),
        *("is_contiguous", "is_floating_point", "is_complex", "storage_offset", "names"),
    ]
)
# What hands out memory that would have to be the ranks'.
_MEMORY = frozenset(["untyped_storage", "storage", "data_ptr", "__dlpack__", "__dlpack_device__"])
_NOTHING = frozenset(["detach_", "requires_grad_"])
_DUNDERS = frozenset(["__dlpack__", "__dlpack_device__"])


class WeightPlace(NamedTuple):
    """A weight of an engine."""

    weights: RankWeights
    location: Location
    is_parameter: bool


@final
class EngineWeight(StandIn):
    """A weight of an engine, outside of any block, or a view of one.

    Use it like the tensor itself: see the module's text.
    """

    __slots__ = ("_place", "_steps", "_twin")

    # As torch.Tensor: a numpy array on the left of an operator leaves it to the right one.
    __array_priority__ = 1000

    _place: WeightPlace
    _steps: tuple[Step, ...]
    _twin: torch.Tensor  # on the meta device

    def __init__(self, place: WeightPlace, steps: tuple[Step, ...], twin: torch.Tensor) -> None:
        for name, value in (("_place", place), ("_steps", steps), ("_twin", twin)):
            object.__setattr__(self, name, value)

    def _force(self, in_torch: bool = False) -> torch.Tensor:
        return self._place.weights.read(self._place.location, self._steps)

    _real_value = _force

    def _is(self, location: Location, steps: tuple[Step, ...]) -> bool:
        """Whether this is what ``steps`` make of the weight at ``location``."""
        return self._place.location == location and repr(self._steps) == repr(steps)

    def left_outside(self) -> NotSupportedError:
        """Return the error for a block that uses this object."""
        location = self._place.location
        return NotSupportedError(
            explain(
                f"The block uses {location}, which was taken outside of it.",
                why="A block runs on the ranks, where a weight is another object.",
                todo=f"Write `{location}` inside the block, or `.clone()` it before.",
            )
        )

    # -- views ---------------------------------------------------------------------------------

    def _views(self, name: str, args: tuple[Any, ...] | None, kwargs: dict[str, Any]) -> Any:
        """Return the views of the weight that a method gives, or None where it gives others."""
        try:
            found = getattr(self._twin, name)
            found = found if args is None else found(*args, **kwargs)
        except Exception:  # it needs data, or other tensors: the call itself says what is wrong
            return None
        step = (name, args, kwargs)
        if _is_same_memory(found, self._twin):
            return EngineWeight(self._place, (*self._steps, step), found)
        if not isinstance(found, (tuple, list)) or not found:
            return None
        if not all(_is_same_memory(one, self._twin) for one in found):
            return None
        return tuple(
            EngineWeight(self._place, (*self._steps, step, ("__getitem__", (number,), {})), one)
            for number, one in enumerate(found)
        )

    def __getitem__(self, index: Any) -> Any:
        index = real(index, False)
        found = self._views("__getitem__", (index,), {})
        if found is None:  # the ranks choose, which sends less
            step = ("__getitem__", (index,), {})
            return self._place.weights.read(self._place.location, (*self._steps, step))
        return found

    def __getattr__(self, name: str) -> Any:
        if name in _MEMORY:
            raise self._refused(f"{name} was asked of {self._place.location}")
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in _FACTS:
            return getattr(self._twin, name)
        if name == "device":
            return torch.device("cpu")  # where its values are when they are used here
        if name == "numpy":
            return lambda **options: _read_only(self._force().numpy(**options))
        found = getattr(self._twin, name)
        if callable(found) and not isinstance(found, torch.Tensor):
            return _Method(self, name)
        return self._views(name, None, {}) if isinstance(found, torch.Tensor) else found

    # -- edits -----------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        index = real(index, False)
        step = ("__getitem__", (index,), {})
        if type(value) is EngineWeight and value._is(self._place.location, (*self._steps, step)):
            return  # `w[i] += v` writes back what was already edited in place
        self._edit(operator.setitem, (index, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        step = (name, None, {})
        if type(value) is EngineWeight and value._is(self._place.location, (*self._steps, step)):
            return
        if name != "data":
            raise self._refused(f"{name} of {self._place.location} was set")
        if (value.shape, value.dtype) != (self._twin.shape, self._twin.dtype):
            raise self._refused(f"{self._place.location} was given another shape or dtype")
        self._edit(method_of("copy_"), (value,), {})

    def _edit(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Edit in place; returns `NotImplemented`, as what stands for it stays the same."""
        name, given, named = _name_of(function), real(args, False), real(kwargs, False)
        if name in _NOTHING and not any((*given, *named.values())):
            return NotImplemented
        if not self._place.is_parameter:
            raise self._refused(f"{self._place.location}, which is no parameter, was edited")
        if name is None or name in DRAWING or named.get("inplace"):
            # Numbers are drawn here, and a function of the user's runs here.
            value = self._force()
            if getattr(function, "__module__", "") == "_operator":
                return function(value, *given)  # tensors have no such edit: it makes a new one
            function(value, *given, **named)
            name, given, named = "copy_", (value,), {}
        self._place.weights.edit(self._place.location, self._steps, (name, given, named))
        return NotImplemented

    def _refused(self, what: str) -> NotSupportedError:
        return NotSupportedError(
            explain(
                f"{what}.",
                why="The weight is on the ranks of the engine.",
                todo="Edit it in place, such as `weight[:] = value`; `weight.clone()` is a copy.",
            )
        )

    # -- what needs data -------------------------------------------------------------------------

    @property
    def __class__(self) -> type:
        # CAUTION: C++ that is told "a tensor" here reads this object as one, and crashes.
        if not is_asked_by_python(sys._getframe(1)):
            return EngineWeight
        is_whole = self._place.is_parameter and not self._steps
        return torch.nn.Parameter if is_whole else torch.Tensor

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a weight cannot be changed")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(function, args, kwargs or {}, in_torch=True)

    def __repr__(self) -> str:
        shape = "".join(f", {name}" for name, _, _ in self._steps)
        return f"EngineWeight({self._place.location}{shape}, shape={list(self._twin.shape)})"

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self._twin))])

    def __len__(self) -> int:
        return len(self._twin)

    def __copy__(self) -> EngineWeight:
        return EngineWeight(self._place, self._steps, self._twin)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._force()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self._force()
        return _read_only(value.__array__() if dtype is None else value.__array__(dtype))


class _Method:
    """A method of a weight."""

    __slots__ = ("_name", "_weight")

    def __init__(self, weight: EngineWeight, name: str) -> None:
        self._weight = weight
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(method_of(self._name), (self._weight, *args), kwargs, in_torch=False)


def _name_of(function: Callable[..., Any]) -> str | None:
    """Return the method of a tensor that ``function`` calls, or None."""
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", "") == "_operator":
        name = f"__{name.strip('_')}__"
    return name if callable(getattr(torch.Tensor, name, None)) else None


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_torch: bool = False,  # weights are read on the client, which never parks
) -> Any:
    """Call ``function``: for views of a weight, as an edit of one, or with the values of all."""
    first, out = args[0] if args else None, kwargs.get("out")
    if type(out) is EngineWeight:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        result = _call(function, args, rest, in_torch=in_torch)
        if result.shape != out.shape:
            raise out._refused(f"{out._place.location} was to become {list(result.shape)}")
        out._edit(method_of("copy_"), (result,), {})
        return out
    if type(first) is EngineWeight and edited_by(function, args, kwargs)[0]:
        first._edit(function, args[1:], kwargs)
        return first
    weights = [leaf for leaf in leaves((args, kwargs)) if type(leaf) is EngineWeight]
    if type(first) is EngineWeight and len(weights) == 1:
        name = _name_of(function)
        views = None if name is None else first._views(name, args[1:], kwargs)
        if views is not None:
            return views
    return _called(function, args, kwargs)


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function`` with the values of the weights, and let the ranks have what it edits."""
    given = real((args, kwargs), False)
    pulled = [
        (mine, theirs, theirs._version)
        for mine, theirs in zip(leaves((args, kwargs)), leaves(given), strict=True)
        if type(mine) is EngineWeight
    ]
    result = function(*given[0], **given[1])
    for mine, theirs, version in pulled:
        if theirs._version != version:
            mine._edit(method_of("copy_"), (theirs,), {})
            result = mine if result is theirs else result
    return _sealed(result, [theirs for _, theirs, _ in pulled])


def _sealed(result: Any, pulled: list[torch.Tensor]) -> Any:
    """Return ``result`` with what shares the memory of a ``pulled`` value made read-only.

    An edit of it would be one of the weight on a model in this process.
    """
    held = {one.untyped_storage().data_ptr() for one in pulled}

    def seal(leaf: Any) -> Any:
        # CAUTION: a weight says that it is a tensor.
        if type(leaf) is EngineWeight or not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_meta or leaf.untyped_storage().data_ptr() not in held:
            return leaf
        if torch.is_inference_mode_enabled():
            raise NotSupportedError(
                explain(
                    "A view of an engine's weight was made within `torch.inference_mode()`.",
                    why="Torch would let it be edited there, and nothing would come of that.",
                    todo="`.clone()` the weight first.",
                )
            )
        with torch.inference_mode():
            return leaf.clone()

    return map_leaves(result, seal)


def _is_same_memory(found: Any, twin: torch.Tensor) -> bool:
    """Whether ``found`` is a view of ``twin``; both are on the meta device, which has no places."""
    if not isinstance(found, torch.Tensor) or not found.is_meta:
        return False
    return found.untyped_storage()._cdata == twin.untyped_storage()._cdata


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


give_operators(cast("Any", EngineWeight), _call)
