"""Any value as a header and one flat payload.

The header is a pickle in which each tensor is a number; the payload holds the tensors' elements,
each at a multiple of 16 bytes. So any mix of dtypes, tuples, dicts, dataclasses and `None` crosses,
and the receiver needs no guess about sizes. A tensor that occurs twice is sent once. Tensors cross
without their autograd graph, and arrive on the CPU; a parameter stays one.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGN = 16
_LENGTH = struct.Struct("<Q")


# How one tensor lies in the payload: the dtype's name, the shape, the offset, and None for a plain
# tensor, else whether the parameter requires grad. No class of ours: it is pickled for each pull.
_Shape: TypeAlias = tuple[str, tuple[int, ...], int, bool | None]
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


class _Writer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not _has_elements(obj):
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def encode(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return ``value`` as a header and the flat pieces of its payload, each ``[bytes]`` uint8.

    Raises:
        Exception: Whatever pickling some part of the value raises.
    """
    # A tensor alone, as most values that cross, needs no pickle of its own: `body` is None.
    body: bytes | None = None
    tensors = [value]
    if not _has_elements(value):
        file = io.BytesIO()
        writer = _Writer(file)
        writer.dump(value)
        body, tensors = file.getvalue(), writer.tensors
    shapes: list[_Shape] = []
    pieces, offset = [], 0
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        flat = plain.contiguous().reshape(-1).view(torch.uint8)
        grad = tensor.requires_grad if isinstance(tensor, torch.nn.Parameter) else None
        shapes.append((str(tensor.dtype), tuple(tensor.shape), offset, grad))
        padding = -len(flat) % _ALIGN
        pieces.append(flat)
        if padding:
            pieces.append(torch.zeros(padding, dtype=torch.uint8))
        offset += len(flat) + padding
    return pickle.dumps((body, shapes)), pieces


def decode(header: bytes, payload: torch.Tensor) -> Any:
    """Return the value of ``header`` and ``payload`` (``[bytes]`` uint8, kept by its tensors)."""
    body, shapes = pickle.loads(header)
    tensors = [_tensor(shape, payload) for shape in shapes]
    return tensors[0] if body is None else _Reader(io.BytesIO(body), tensors).load()


def _has_elements(obj: Any) -> bool:
    """Whether ``obj`` is a tensor that crosses by its elements, and not in torch's own way.

    Raises:
        PicklingError: A tensor on the meta device.
    """
    # CAUTION: a remote value says that it is a tensor, and moves bytes to do so.
    if type(obj) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if obj.is_meta:
        raise pickle.PicklingError("a tensor on the meta device has no elements to send")
    return obj.layout == torch.strided and not obj.is_quantized


def _tensor(of: _Shape, payload: torch.Tensor) -> torch.Tensor:
    name, shape, offset, is_parameter = of
    dtype = _DTYPES[name]
    length = math.prod(shape) * dtype.itemsize
    tensor = payload[offset : offset + length].view(dtype).reshape(shape)
    if is_parameter is None:
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=is_parameter)


def to_bytes(value: Any) -> bytes:
    """Return ``value`` in one piece."""
    return in_one_piece(*encode(value))


def in_one_piece(header: bytes, pieces: Sequence[torch.Tensor]) -> bytes:
    """Return what `encode` gave, as `from_bytes` takes it."""
    parts = [_LENGTH.pack(len(header)), header]
    parts += [piece.numpy().data for piece in pieces]
    return b"".join(parts)


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` made ``data`` of. Its tensors own writable memory."""
    start = _LENGTH.size
    (length,) = _LENGTH.unpack_from(data)
    header = data[start : start + length]
    elements = bytearray(memoryview(data)[start + length :])
    payload = torch.empty(0, dtype=torch.uint8)
    if elements:
        payload = torch.frombuffer(elements, dtype=torch.uint8)
    return decode(header, payload)
