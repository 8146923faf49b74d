"""Whether two ranks that ran the same lines have the same value.

What a block computes for itself, it computes on every rank. Ranks that took other numbers into
account (a clock, a process id, the order of a set) have other values, and one of them would win
unseen. So they are compared here, as far as two ranks may not differ:

* Numbers of any kind but floating-point ones, texts, bytes and sets of them: exactly.
* Floating-point numbers: up to rounding, since ranks may add in another order, and what is left of
  a sum that cancels may be nothing but rounding. Of a block that can tell its rank from others (by
  a clock, a process id), only what a sum of that size can round. Whole numbers must be equal, and
  so must numbers of a block that reads a clock, where they are finer than a value of a model can
  be. A number that is none is like another one that is none.
* Objects: by what they hold. Their own `==` is asked of the standard library's only.
* What cannot be compared (functions, modules, sets of objects) counts as alike.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import struct
import types
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.kept import Split
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.report import Elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# How many values are looked at before two objects count as alike.
_MOST_VALUES = 100_000
_NUM_SAMPLES = 64
_SINGLE = torch.finfo(torch.float32).eps
# Up to this many units of the last place are rounding of a value of that size: 27 were seen, in a
# dot product of 576 numbers.
_ULPS = 64
# Up to this part of it, or of one, may be left of values that cancel.
_LEFT_OF_A_SUM = 0.05
# Above it, numbers of single precision are whole because nothing finer is left.
_MOST_WHOLE = float(1 << 23)
_EXACT = (int, str, bytes, bytearray, type(None))
_BY_EQUALITY = (
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    fractions.Fraction, pathlib.PurePath, range, slice, torch.device, torch.dtype, uuid.UUID,
)  # fmt: skip
_OPAQUE = (
    RemoteValue, Elsewhere, Split, type, types.FunctionType, types.MethodType, types.ModuleType,
    types.BuiltinFunctionType,
)  # fmt: skip


class Apart(NamedTuple):
    """Where two values differ.

    Attributes:
        path: Behind the value's name, such as ``[2].total``; empty for the value itself.
        one: What the first has there.
        other: What the second has there.
    """

    path: str
    one: Any
    other: Any


@dataclass(frozen=True, slots=True)
class Sampled:
    """Stands for a tensor that is compared and not sent.

    Attributes:
        values: Some of its elements, evenly spread.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sampled:
        """Return what stands for ``tensor``."""
        flat = _strided(tensor).reshape(-1)
        if len(flat) > _NUM_SAMPLES:
            # In whole numbers: every rank takes the same elements.
            flat = flat[torch.arange(_NUM_SAMPLES) * len(flat) // _NUM_SAMPLES]
        return cls(tuple(tensor.shape), tensor.dtype, flat.cpu().clone())


@final
class Comparison:
    """One comparison of what two ranks say.

    Args:
        precision: The relative precision of the model's values, as `torch.finfo` has it.
        reads_clock: Whether the block may have read a clock. Asked only where it matters.
        knows_rank: Whether it may know on which rank it runs, by a clock or otherwise. Likewise.
    """

    def __init__(
        self,
        precision: float = _SINGLE,
        reads_clock: Callable[[], bool] = lambda: False,
        knows_rank: Callable[[], bool] = lambda: True,
    ) -> None:
        self._precision = max(precision, _SINGLE)
        self._reads_clock = reads_clock
        self._knows_rank = knows_rank
        self._seen: set[tuple[int, int]] = set()

    def apart(self, one: Any, other: Any) -> Apart | None:
        """Return where ``one`` and ``other`` differ, or None where they are alike."""
        try:
            return self._apart(one, other)
        except RecursionError:
            return None

    def _apart(self, one: Any, other: Any) -> Apart | None:
        kind = type(one)
        if one is other or issubclass(kind, _OPAQUE) or issubclass(type(other), _OPAQUE):
            return None
        if isinstance(other, Sampled) and issubclass(kind, torch.Tensor):
            return self._sample_apart(Sampled.of(one), other)
        return self._values_apart(kind, one, other)

    def _values_apart(self, kind: type, one: Any, other: Any) -> Apart | None:
        if kind.__qualname__ != type(other).__qualname__:
            return Apart("", kind.__qualname__, type(other).__qualname__)
        if (id(one), id(other)) in self._seen:
            return None
        if issubclass(kind, _EXACT):
            return None if one == other else Apart("", one, other)
        if issubclass(kind, float):
            return None if self._are_close(one, other) else Apart("", one, other)
        if issubclass(kind, complex):
            pairs = ((one.real, other.real), (one.imag, other.imag))
            return None if all(self._are_close(*pair) for pair in pairs) else Apart("", one, other)
        if issubclass(kind, torch.Tensor):
            return self._tensors_apart(one, other)
        # Their ids stay theirs: both are held by what is compared.
        self._seen.add((id(one), id(other)))
        if len(self._seen) > _MOST_VALUES:
            return None
        return self._holders_apart(kind, one, other)

    def _holders_apart(self, kind: type, one: Any, other: Any) -> Apart | None:
        if issubclass(kind, (list, tuple, deque)):
            return self._items_apart(enumerate(one), enumerate(other), len(one), len(other))
        if issubclass(kind, dict):
            for mine, theirs in zip(one, other, strict=False):
                if self._apart(mine, theirs) is not None:
                    return Apart(" (a key)", mine, theirs)
            return self._items_apart(one.items(), other.items(), len(one), len(other))
        if issubclass(kind, (set, frozenset)):
            return self._sets_apart(one, other)
        if issubclass(kind, enum.Enum):
            return None if one.name == other.name else Apart("", one, other)
        if issubclass(kind, _BY_EQUALITY):
            return None if one == other else Apart("", one, other)
        if kind.__module__ == "numpy":
            return self._arrays_apart(one, other)
        for name, mine in _held_by(one).items():
            theirs = _held_by(other).get(name)
            if (found := self._apart(mine, theirs)) is not None:
                return found._replace(path=f".{name}{found.path}")
        return None

    def _items_apart(
        self,
        mine: Iterable[tuple[Any, Any]],
        theirs: Iterable[tuple[Any, Any]],
        num_mine: int,
        num_theirs: int,
    ) -> Apart | None:
        if num_mine != num_theirs:
            return Apart(" (its length)", num_mine, num_theirs)
        for (place, one), (_, other) in zip(mine, theirs, strict=False):
            if (found := self._apart(one, other)) is not None:
                return found._replace(path=f"[{place!r}]{found.path}")
        return None

    def _sets_apart(self, one: Any, other: Any) -> Apart | None:
        """Compare sets, whose order says nothing."""
        if one == other:
            return None
        if len(one) != len(other):
            return Apart(" (its length)", len(one), len(other))
        mine, theirs = one - other, other - one
        # An object is in a set by its identity, a number that is rounded by its last bit.
        if all(_is_exact(item) for item in (*mine, *theirs)):
            return Apart("", mine, theirs)
        return None

    # -- numbers -------------------------------------------------------------------------------

    def _are_close(self, one: float, other: float) -> bool:
        if one == other or (math.isnan(one) and math.isnan(other)):
            return True
        scale = max(abs(one), abs(other))
        if not math.isfinite(scale) or math.isnan(one) or math.isnan(other):
            return False
        if one.is_integer() and other.is_integer() and scale < _MOST_WHOLE:
            return False
        precision = max(self._precision, _precision_of(one, other))
        if abs(one - other) > self._most(precision, scale, abs(one - other)):
            return False
        is_of_a_model = _is_single(one) and _is_single(other)
        return is_of_a_model or not self._reads_clock()

    def _sample_apart(self, one: Sampled, other: Sampled) -> Apart | None:
        facts = ((one.shape, other.shape), (one.dtype, other.dtype))
        for mine, theirs in facts:
            if mine != theirs:
                return Apart("", mine, theirs)
        found = self._tensors_apart(one.values, other.values)
        return None if found is None else found._replace(path=" (an element)")

    def _tensors_apart(self, one: torch.Tensor, other: torch.Tensor) -> Apart | None:
        for mine, theirs in ((tuple(one.shape), tuple(other.shape)), (one.dtype, other.dtype)):
            if mine != theirs:
                return Apart("", mine, theirs)
        one, other = _strided(one.detach()), _strided(other.detach())
        if torch.equal(one, other):
            return None
        apart = ~self._are_elements_close(one, other)
        if not apart.any():
            return None
        place = tuple(apart.nonzero()[0].tolist())
        path = f"[{', '.join(map(str, place))}]" if place else ""
        return Apart(path, one[place].item(), other[place].item())

    def _are_elements_close(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return for each element whether it is alike; both have the same shape and dtype."""
        if one.is_complex():
            mine, theirs = torch.view_as_real(one), torch.view_as_real(other)
            return self._are_elements_close(mine, theirs).all(-1)
        if not one.is_floating_point():
            return one == other
        precision = max(self._precision, min(_precision_in(one), _precision_in(other)))
        one, other = one.double(), other.double()
        same = (one == other) | (one.isnan() & other.isnan())
        finite = one.isfinite() & other.isfinite()
        size = torch.maximum(one.abs(), other.abs()).where(finite, 0.0)
        scale = size.max().item()
        whole = (one == one.round()) & (other == other.round())
        if scale < _MOST_WHOLE and (whole | ~finite).all():
            return same
        off = (one - other).abs()
        most = self._most(precision, scale, off.where(finite, 0.0).max().item())
        return same | (finite & (off <= most))

    def _most(self, precision: float, scale: float, off: float) -> float:
        """Return how far apart numbers of that size may be; ``off`` is how far they are."""
        most = _ULPS * max(precision * scale, _SINGLE)
        if off <= most or self._knows_rank():
            return most
        return max(_LEFT_OF_A_SUM, _ULPS * precision) * max(scale, 1.0)

    def _arrays_apart(self, one: Any, other: Any) -> Apart | None:
        """Compare numpy's arrays, and its numbers, by what they are in Python."""
        if one.shape != other.shape or one.dtype != other.dtype:
            return Apart("", (one.shape, str(one.dtype)), (other.shape, str(other.dtype)))
        if not one.dtype.hasobject and one.tobytes() == other.tobytes():
            return None
        return self._apart(one.tolist(), other.tolist())


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return plain if plain.layout == torch.strided else plain.to_dense()


def _is_single(number: float) -> bool:
    """Whether ``number`` is one of single precision, as the values of models are."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0] == number
    except OverflowError:
        return False


def _precision_of(one: float, other: float) -> float:
    """Return the precision of the coarsest numbers of a model that both can be."""
    return _precision_in(torch.tensor([one, other], dtype=torch.float64))


def _precision_in(values: torch.Tensor) -> float:
    """Return the precision of the coarsest numbers of a model that all ``values`` can be."""
    for dtype in (torch.bfloat16, torch.float16):
        back = values.to(dtype).to(values.dtype)
        if ((back == values) | values.isnan()).all():
            return torch.finfo(dtype).eps
    return max(_SINGLE, torch.finfo(values.dtype).eps)


def _is_exact(item: Any) -> bool:
    if type(item) in (tuple, frozenset):
        return all(_is_exact(part) for part in item)
    return type(item) in (int, bool, str, bytes, type(None))


def _held_by(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without asking it for one that it computes."""
    held: dict[str, Any] = {}
    if isinstance(value, BaseException):
        held["args"] = value.args
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    held[name] = member.__get__(value)
                except AttributeError:
                    continue  # not bound
    with contextlib.suppress(AttributeError):
        held.update(object.__getattribute__(value, "__dict__"))
    return held
