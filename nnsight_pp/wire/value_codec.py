"""Any value as a header and one flat payload.

The header is a pickle in which each tensor is a number; the payload holds the tensors' elements,
each at a multiple of 16 bytes. So any mix of dtypes, tuples, dicts, dataclasses and `None` crosses,
and the receiver needs no guess about sizes. A tensor that occurs twice is sent once. Tensors cross
without their autograd graph, and arrive on the CPU; a parameter stays one.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGN = 16
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one tensor lies in the payload.

    Attributes:
        is_parameter: None for a plain tensor, else whether the parameter requires grad.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    is_parameter: bool | None = None


class _Writer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        # CAUTION: a remote value says that it is a tensor, and moves bytes to do so.
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if obj.device.type == "meta":
            raise pickle.PicklingError("a tensor on the meta device has no elements to send")
        if obj.layout != torch.strided or obj.is_quantized:
            return None  # torch's own way
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
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(value)
    shapes, pieces, offset = [], [], 0
    for tensor in writer.tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        flat = plain.contiguous().reshape(-1).view(torch.uint8)
        grad = tensor.requires_grad if isinstance(tensor, torch.nn.Parameter) else None
        shapes.append(_Shape(tensor.dtype, tuple(tensor.shape), offset, grad))
        padding = -len(flat) % _ALIGN
        pieces.append(flat)
        if padding:
            pieces.append(torch.zeros(padding, dtype=torch.uint8))
        offset += len(flat) + padding
    return pickle.dumps((file.getvalue(), shapes)), pieces


def decode(header: bytes, payload: torch.Tensor) -> Any:
    """Return the value of ``header`` and ``payload`` (``[bytes]`` uint8, kept by its tensors)."""
    body, shapes = pickle.loads(header)
    tensors = [_tensor(shape, payload) for shape in shapes]
    return _Reader(io.BytesIO(body), tensors).load()


def _tensor(shape: _Shape, payload: torch.Tensor) -> torch.Tensor:
    count = 1
    for size in shape.shape:
        count *= size
    length = count * shape.dtype.itemsize
    flat = payload[shape.offset : shape.offset + length]
    tensor = flat.view(shape.dtype).reshape(shape.shape)
    if shape.is_parameter is None:
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=shape.is_parameter)


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
