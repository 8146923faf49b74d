"""Any value as a header and one flat payload.

The header is a pickle in which each tensor is a number; the payload holds the tensors' elements. So
any mix of dtypes, tuples, dicts, dataclasses and `None` crosses, and the receiver needs no guess
about sizes. A tensor that occurs twice is sent once; tensors and arrays that share memory arrive as
views of one memory (`shared_memory`). Tensors cross without their autograd graph, and arrive on the
CPU; a parameter stays one.

A report may hold thousands of small tensors. Those of one dtype and shape lie behind each other as
one tensor that holds them all, so that torch takes them apart, and not a loop here. Each that
arrives and shared none has memory of its own, which goes with it.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
from array import array
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, final

import cloudpickle
import numpy as np
import torch

from nnsight_pp.core.block import Scope
from nnsight_pp.core.kept import FromHome, is_plain_data
from nnsight_pp.core.meaning import all_codes
from nnsight_pp.wire.odd_objects import reduced_view
from nnsight_pp.wire.shared_memory import piece_of, pools_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ALIGN = 16
_LENGTH = struct.Struct("<Q")
# Larger ones are not copied together, nor out of the payload.
_MOST_TOGETHER = 1 << 16


# How alike tensors lie in the payload: the dtype's name, the shape of each, the offset, None for
# plain tensors, else whether the parameter requires grad, and how many there are. No class of ours:
# it is pickled for each pull.
_Group: TypeAlias = tuple[str, tuple[int, ...], int, bool | None, int]
# How tensors lie in a piece that they share: its offset and length, and for each the dtype's name,
# the shape, the strides, the byte where it begins, and the same about parameters.
_View: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], int, bool | None]
_Shared: TypeAlias = tuple[int, int, list[_View]]
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def _numbered(number: int) -> NoReturn:
    """Stand in the header for the tensor of that number; `_Reader` puts it there."""
    raise pickle.UnpicklingError(f"tensor {number} of a header that was read without its payload")


def _array_of(tensor: torch.Tensor, is_turned: bool) -> Any:
    """Return the array that shows the memory of ``tensor``."""
    array = tensor.numpy()
    return array.T if is_turned else array


class _Writer(cloudpickle.Pickler):
    """Takes the tensors, and the arrays of torch's dtypes, out of what it writes.

    By `reducer_override`, which is not asked about numbers, texts and plain containers, as
    `persistent_id` is; and pickle itself knows a tensor that it has met before.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if kind is np.ndarray:
            turned = obj.flags.f_contiguous and not obj.flags.c_contiguous
            tensor = _tensor_of(obj.T if turned else obj)
            if tensor is not None:
                return _array_of, (tensor, turned)
        if not _has_elements(obj):
            return super().reducer_override(obj)
        self.tensors.append(obj)
        return _numbered, (len(self.tensors) - 1,)


@final
class _DeepWriter(_Writer):
    """Exchanges objects inside of what it writes.

    Args:
        file: Gets the bytes.
        instead_of: Returns what goes in place of an object, or None.
    """

    def __init__(self, file: io.BytesIO, instead_of: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._instead_of = instead_of
        # By id: tensors that this has made of arrays, which go as they are.
        self._made: dict[int, Any] = {}
        # By the id of a block's scope: those of its names that go with its functions.
        self._names: dict[int, dict[str, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._made:
            return None
        found = self._instead_of(obj)
        return None if found is None else (found,)

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if kind is FunctionType and type(obj.__globals__) is Scope:
            obj = self._made[id(obj)] = self._with_names(obj)
        elif issubclass(kind, BaseException):
            return _with_causes(obj)
        found = reduced_view(obj) or super().reducer_override(obj)
        if kind is np.ndarray and found is not NotImplemented:
            self._made[id(found[1][0])] = found[1][0]
        return found

    def _with_names(self, function: FunctionType) -> FunctionType:
        """Return a function of a block with what it sees of the names around the block."""
        scope: Any = function.__globals__
        names = self._names.setdefault(id(scope), {"__name__": scope["__name__"]})
        for name in (name for code in all_codes(function.__code__) for name in code.co_names):
            try:
                value = scope[name]
            except KeyError:
                continue  # an attribute, or a builtin
            if name in scope or is_plain_data(value) or self._instead_of(value) is not None:
                names[name] = value
        made = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(made, function)
        return made


def _with_causes(error: BaseException) -> Any:
    """Return how an exception is pickled, with those that it came from."""
    made: Any = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    state = made[2] if len(made) > 2 else None
    causes = error.__cause__, error.__context__, error.__suppress_context__
    return made[0], made[1], (state, causes), None, None, _set_causes


def _set_causes(error: BaseException, state: tuple[Any, tuple[Any, Any, bool]]) -> None:
    own, (error.__cause__, error.__context__, error.__suppress_context__) = state
    if own is not None:
        error.__setstate__(own)


class _Reader(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: list[torch.Tensor], own: Callable[[FromHome], Any]
    ) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._own = own

    def persistent_load(self, pid: Any) -> Any:
        (found,) = pid
        return self._own(found) if type(found) is FromHome else found

    def find_class(self, module: str, name: str) -> Any:
        if name == _numbered.__name__ and module == __name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _as_it_is(word: FromHome) -> Any:
    return word


def encode(
    value: Any, instead_of: Callable[[Any], Any] | None = None
) -> tuple[bytes, list[torch.Tensor]]:
    """Return ``value`` as a header and the flat pieces of its payload, each ``[bytes]`` uint8.

    Args:
        value: What is to cross.
        instead_of: Returns what goes in place of an object inside of it, or None. It makes the
            writing slow.

    Raises:
        Exception: Whatever pickling some part of the value raises.
    """
    # A tensor alone, as most values that cross, needs no pickle of its own: `body` is None.
    body: bytes | None = None
    tensors = [value]
    if not _has_elements(value):
        file = io.BytesIO()
        writer = _Writer(file) if instead_of is None else _DeepWriter(file, instead_of)
        writer.dump(value)
        body, tensors = file.getvalue(), writer.tensors
    groups, members, num_pools = _grouped(tensors)
    table: list[_Group | _Shared] = []
    pieces, offset = [], 0
    for number, alike in enumerate(groups):
        first = alike[0]
        if number < num_pools:
            flat, starts = piece_of(alike)
            views = [_view(one, start) for one, start in zip(alike, starts, strict=True)]
            table.append((offset, len(flat), views))
        else:
            flat = _flat(alike)
            table.append(
                (str(first.dtype), tuple(first.shape), offset, _grad_of(first), len(alike))
            )
        padding = -len(flat) % _ALIGN
        pieces.append(flat)
        if padding:
            pieces.append(torch.zeros(padding, dtype=torch.uint8, device="cpu"))
        offset += len(flat) + padding
    return pickle.dumps((body, table, members)), pieces


def _tensor_of(one: Any) -> torch.Tensor | None:
    """Return a tensor that shows the memory of an array, or None where there is none such."""
    if one.dtype.kind not in "fiubc" or not one.flags.writeable:
        return None
    try:
        return torch.from_numpy(one)
    except (TypeError, ValueError):  # numbers of another size or order; steps backwards
        return None


def _grad_of(tensor: torch.Tensor) -> bool | None:
    return tensor.requires_grad if isinstance(tensor, torch.nn.Parameter) else None


def _view(tensor: torch.Tensor, start: int) -> _View:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return str(tensor.dtype), shape, stride, start, _grad_of(tensor)


def _grouped(tensors: list[torch.Tensor]) -> tuple[list[list[torch.Tensor]], bytes, int]:
    """Return what lies together, and for each of several tensors the number of its group.

    Last comes how many of the groups, the first ones, are tensors that share memory.
    """
    if len(tensors) == 1:
        return [tensors], b"", 0
    pools = pools_of(tensors)
    groups = [[tensors[number] for number in pool] for pool in pools]
    pool_of = {number: which for which, pool in enumerate(pools) for number in pool}
    known: dict[Any, int] = {}
    members = array("I")
    for place, tensor in enumerate(tensors):
        if place in pool_of:
            members.append(pool_of[place])
            continue
        shape, dtype = tensor.shape, tensor.dtype
        number = len(groups)
        if tensor.numel() * dtype.itemsize <= _MOST_TOGETHER:
            grad = type(tensor) is not torch.Tensor and tensor.requires_grad
            kind = (shape, dtype, tensor.device, type(tensor), grad)
            number = known.setdefault(kind, number)
        if number == len(groups):
            groups.append([])
        groups[number].append(tensor)
        members.append(number)
    return groups, members.tobytes(), len(pools)


def _flat(alike: list[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors of one dtype and shape as ``[bytes]`` uint8."""
    one = alike[0]
    if (
        len(alike) == 1 and one.is_cpu and one.is_contiguous()
        and not (one.requires_grad or one.is_conj() or one.is_neg())
    ):  # fmt: skip
        return one.reshape(-1).view(torch.uint8)
    with torch.no_grad():
        whole = alike[0].detach() if len(alike) == 1 else torch.stack(alike)
        plain = whole.cpu().resolve_conj().resolve_neg()
        return plain.contiguous().reshape(-1).view(torch.uint8)


def decode(header: bytes, payload: torch.Tensor, own: Callable[[FromHome], Any] = _as_it_is) -> Any:
    """Return the value of ``header`` and ``payload`` (``[bytes]`` uint8).

    Args:
        header: As `encode` gave it.
        payload: Its pieces, one behind the other.
        own: Returns what is meant by a `FromHome` that was put in place of an object.

    Large tensors, and a tensor alone, lie in the payload and keep it; others are copied out of it.
    """
    body, table, members = pickle.loads(header)
    groups = [_views(one, payload) if len(one) == 3 else _tensors(one, payload) for one in table]
    if body is None:
        return groups[0][0]
    tensors = groups[0] if len(groups) == 1 else _in_turn(groups, members)
    return _Reader(io.BytesIO(body), tensors, own).load()


def _in_turn(groups: list[list[torch.Tensor]], members: bytes) -> list[torch.Tensor]:
    """Return the tensors in the order of their numbers."""
    numbers = array("I")
    numbers.frombytes(members)
    left = [iter(group) for group in groups]
    return [next(left[number]) for number in numbers]


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


def _views(shared: _Shared, payload: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a piece of memory that they share."""
    offset, length, views = shared
    storage = payload[offset : offset + length].clone().untyped_storage()
    found = []
    for name, shape, stride, start, is_parameter in views:
        dtype = _DTYPES[name]
        one: Any = torch.empty(0, dtype=dtype, device=storage.device)
        one.set_(storage, start // dtype.itemsize, shape, stride)
        if is_parameter is not None:
            one = torch.nn.Parameter(one, requires_grad=is_parameter)
        found.append(one)
    return found


def _tensors(group: _Group, payload: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of ``group``."""
    name, shape, offset, is_parameter, count = group
    dtype = _DTYPES[name]
    length = count * math.prod(shape) * dtype.itemsize
    if count > 1:
        whole = payload[offset : offset + length].view(dtype).reshape(count, *shape)
        apart: Any = torch.unbind_copy(whole)
        tensors = list(apart)
    elif length == len(payload) or not length:
        elements = payload if length else payload[:0]
        tensors = [elements.view(dtype).reshape(shape)]
    elif length <= _MOST_TOGETHER:
        tensors = [payload[offset : offset + length].view(dtype).reshape(shape).clone()]
    else:  # of a storage that has its own length, and keeps the payload
        start = offset + payload.storage_offset()
        own: Any = torch.empty(0, dtype=dtype, device=payload.device)
        tensors = [own.set_(payload.untyped_storage()[start : start + length], 0, shape)]
    if is_parameter is None:
        return tensors
    return [torch.nn.Parameter(one, requires_grad=is_parameter) for one in tensors]


def to_bytes(value: Any, instead_of: Callable[[Any], Any] | None = None) -> bytes:
    """Return ``value`` in one piece; ``instead_of`` is as `encode` takes it."""
    return in_one_piece(*encode(value, instead_of))


def in_one_piece(header: bytes, pieces: Sequence[torch.Tensor]) -> bytes:
    """Return what `encode` gave, as `from_bytes` takes it."""
    parts = [_LENGTH.pack(len(header)), header]
    parts += [piece.numpy().data for piece in pieces]
    return b"".join(parts)


def from_bytes(data: bytes, own: Callable[[FromHome], Any] = _as_it_is) -> Any:
    """Return the value that `to_bytes` made ``data`` of. Its tensors own writable memory.

    ``own`` is as `decode` takes it.
    """
    start = _LENGTH.size
    (length,) = _LENGTH.unpack_from(data)
    header = data[start : start + length]
    elements = bytearray(memoryview(data)[start + length :])
    payload = torch.empty(0, dtype=torch.uint8, device="cpu")
    if elements:
        payload = torch.frombuffer(elements, dtype=torch.uint8)
    return decode(header, payload, own)
