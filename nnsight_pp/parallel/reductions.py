"""What the owner of a value computes before it sends: calls that make a tensor smaller.

`layer.output.norm(dim=-1)` on another stage sends one number for each row. The result must be what
the block's own line gives on the owner, bit for bit. For a choice it always is; for a sum only
where the answer lies on the device that the owner's worker computes on; for a rounding only where
the value has more bytes than its result, else the owner's line gives the value itself, no copy.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_CHOICES = frozenset(
    ["amax", "amin", "max", "min", "argmax", "argmin", "topk", "any", "all", "count_nonzero"]
)
_ROUNDINGS = frozenset(["half", "bfloat16", "to"])
_SUMS = frozenset(["sum", "mean", "norm", "prod", "std", "var", "logsumexp", "nansum", "nanmean"])
_NAMES = _CHOICES | _ROUNDINGS | _SUMS
# What each function of torch is called as a method.
_METHODS = {
    getattr(place, name): name
    for place in (torch, torch.Tensor)
    for name in _NAMES
    if hasattr(place, name)
}
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


class Reduction(NamedTuple):
    """A call of a tensor's method. Prints as the call."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def of(self, value: Any) -> Any:
        """Return the result of the call on ``value``."""
        return getattr(value, self.name)(*self.args, **dict(self.kwargs))

    def __repr__(self) -> str:
        """Return the call as it is written."""
        shown = [repr(one) for one in self.args]
        shown += [f"{name}={value!r}" for name, value in self.kwargs]
        return f".{self.name}({', '.join(shown)})"


def reduction(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    sums_alike: bool,
    casts_copy: bool,
) -> Reduction | None:
    """Return what the owner can compute of ``function(value, *args, **kwargs)``, or None.

    Args:
        function: A function of torch, or what `method` returned.
        args: Its arguments behind the value.
        kwargs: Its named arguments.
        sums_alike: Whether a sum by the owner's link has the bits of one by its worker.
        casts_copy: Whether a cast to two bytes gives a tensor of its own.
    """
    name = _METHODS.get(function) or getattr(function, "method", None)
    if name not in _NAMES or (name in _SUMS and not sums_alike):
        return None
    if name in _ROUNDINGS and not casts_copy:
        return None
    if kwargs.get("out", function) is None:  # `torch.norm` hands it on; no method takes it
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    # The owner's link does not run under it: there `prod` of two-byte numbers has four bytes.
    if torch._C._is_any_autocast_enabled():
        return None
    if not all(map(_is_plain, (*args, *kwargs.values()))):
        return None
    if name == "to" and not _is_rounding(args, kwargs):
        return None
    return Reduction(name, args, tuple(kwargs.items()))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _is_rounding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether ``to`` is given a dtype alone, of at most two bytes."""
    given = (*args, *kwargs.values())
    return (
        len(given) == 1
        and type(given[0]) is torch.dtype
        and given[0].itemsize <= torch.float16.itemsize
    )


def is_reducing_call(name: str, frame: FrameType) -> bool:
    """Tell whether ``frame`` is about to call the method ``name``, and does not only look it up."""
    return name in _NAMES and _is_call_at(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _is_call_at(code: CodeType, offset: int) -> bool:
    for one in dis.get_instructions(code):
        if one.offset == offset:
            # Python 3.12 and newer: one instruction for both, with a bit that tells them apart.
            return one.opname == "LOAD_METHOD" or (
                one.opname == "LOAD_ATTR" and "NULL|self" in one.argrepr
            )
    return False
