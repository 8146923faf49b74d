"""Which values lie in the same memory: a write into one of them shows in the others.

Values that cross apart would be copies of their own. So those whose memory overlaps are found here
by their addresses, whoever made them: views of a tensor, an array and the tensor made of it, a
buffer and what looks into it. They cross as one piece of memory and as views of it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from nnsight_pp.core.kept import Look

if TYPE_CHECKING:
    from collections.abc import Sequence

# A piece may be so many times as large as its views: more, and they are looked at one by one.
_MOST_BETWEEN = 2
_ALIGN = 16


def overlapping(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of those ``spans``, each a start and a stop, that overlap with others.

    Each list holds what hangs together, in order of the numbers. An empty span overlaps with none.
    """
    order = sorted(range(len(spans)), key=spans.__getitem__)
    found: list[list[int]] = []
    now: list[int] = []
    stop = 0
    for number in order:
        start, its_stop = spans[number]
        if its_stop <= start:
            continue
        if start >= stop:
            if len(now) > 1:
                found.append(sorted(now))
            now = []
        now.append(number)
        stop = max(stop, its_stop)
    if len(now) > 1:
        found.append(sorted(now))
    return found


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the elements of ``tensor`` begin and end."""
    start, size = tensor.data_ptr(), tensor.itemsize
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size if tensor.numel() else start


def span_of_array(array: Any) -> tuple[int, int]:
    """Return where the elements of an array of numpy's begin and end."""
    start = array.__array_interface__["data"][0]
    if not array.size:
        return start, start
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    return start + low, start + high + array.itemsize


def span_of_buffer(buffer: Any) -> tuple[int, int]:
    """Return where an object that shows its memory in one piece has it."""
    return span_of_array(np.frombuffer(buffer, dtype=np.uint8)) if len(buffer) else (0, 0)


def pools_of(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of those ``tensors`` that share elements, by what they share.

    Cost: a third of a microsecond for each, where none does.
    """
    if not _may_overlap(tensors):
        return []
    found: list[list[int]] = []
    # On each device addresses are its own.
    for device in {tensor.device for tensor in tensors}:
        numbers = [
            number
            for number, one in enumerate(tensors)
            if one.device == device and not (one.is_conj() or one.is_neg())
        ]
        for pool in overlapping([span_of(tensors[number]) for number in numbers]):
            chosen = [numbers[one] for one in pool]
            if _share_elements([tensors[number] for number in chosen]):
                found.append(chosen)
    return found


def _may_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two spans may overlap: a quick look, as hardly ever any do."""
    spans = [
        (one.data_ptr(), one.nbytes) if one.is_contiguous() else (one.data_ptr(), -1)
        for one in tensors
    ]
    spans.sort()
    end = 0
    for start, length in spans:
        if length < 0 or start < end:
            return True
        end = start + length
    return False


def _share_elements(tensors: list[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` shows an element of another; they lie among each other.

    Two columns of a matrix do not. Where the memory between them is small that makes no difference.
    """
    starts, stops = zip(*map(span_of, tensors), strict=True)
    start, length = min(starts), max(stops) - min(starts)
    size = tensors[0].itemsize
    held = sum(one.numel() * one.itemsize for one in tensors)
    if length <= _MOST_BETWEEN * held:
        return True
    is_simple = all(
        one.itemsize == size and not (one.data_ptr() - start) % size and 0 not in one.stride()
        for one in tensors
    )
    if not is_simple:
        return True
    seen = torch.zeros(length // size, dtype=torch.uint8, device="cpu")
    for one in tensors:
        place = seen.as_strided(one.shape, one.stride(), (one.data_ptr() - start) // size)
        if bool(place.any()):
            return True
        place.fill_(1)
    return False


def piece_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return the memory that ``tensors`` share, ``[bytes]`` uint8, and where each begins in it."""
    spans = [span_of(one) for one in tensors]
    start, stop = min(spans)[0], max(stop for _, stop in spans)
    lead = start % _ALIGN  # so that each lies as it is aligned here
    piece = torch.zeros(lead + stop - start, dtype=torch.uint8, device="cpu")
    with torch.no_grad():
        if tensors[0].is_cpu:
            piece[lead:] = torch.frombuffer(memory_at(start, stop), dtype=torch.uint8)
        else:
            whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
            storage = tensors[0].untyped_storage()
            offset = start - storage.data_ptr()
            whole.set_(storage, offset, (stop - start,), (1,))  # type: ignore[call-overload]
            piece[lead:] = whole.cpu()
    return piece, [one - start + lead for one, _ in spans]


def memory_at(start: int, stop: int) -> Any:
    """Return a buffer of the memory from ``start`` to ``stop``, which the caller keeps alive."""
    return (ctypes.c_uint8 * (stop - start)).from_address(start)


def shown(whole: Any, look: Look) -> Any:
    """Return the tensor or the array that shows the memory of the tensor or array ``whole``."""
    if not isinstance(look.dtype, torch.dtype):
        return np.asarray(_Shown(whole, look))
    if isinstance(whole, torch.Tensor):
        storage = whole.untyped_storage()
        start = span_of(whole)[0] - storage.data_ptr() + look.offset
    else:
        first, last = span_of_array(whole)
        flat = Look("|u1", (last - first,), (1,), 0, is_writeable=True)
        storage, start = torch.from_numpy(shown(whole, flat)).untyped_storage(), look.offset
    made: Any = torch.empty(0, dtype=look.dtype, device=storage.device)
    return made.set_(storage, start // look.dtype.itemsize, look.shape, look.strides)


@final
class _Shown:
    """Lets numpy show the memory of another object, and keeps it.

    Source: numpy 2 reference, "The array interface protocol".
    """

    def __init__(self, whole: Any, look: Look) -> None:
        self._whole = whole
        is_tensor = isinstance(whole, torch.Tensor)
        start = (span_of if is_tensor else span_of_array)(whole)[0] + look.offset
        fields = [] if isinstance(look.dtype, str) else [tuple(one) for one in look.dtype]
        size = sum(np.dtype([one]).itemsize for one in fields)
        self.__array_interface__ = {
            "version": 3,
            "data": (start, not look.is_writeable),
            "shape": look.shape,
            "strides": look.strides,
            "typestr": f"|V{size}" if fields else look.dtype,
            **({"descr": fields} if fields else {}),
        }
