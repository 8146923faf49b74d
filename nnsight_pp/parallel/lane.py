"""Published tensors that cross without the interpreter: what the compiled `Lane` is told and gives.

Most pulls are of one tensor that exists by now, or of a part of it by numbers and slices. It may
stand in a tuple, or be the first argument of a call. The extension knows these, answers them on the
owner's reader thread without the GIL, and wakes the forward thread that waits for one. All
other questions and answers take the way through Python, as all do where there is no extension.
`csrc/lane.hpp` is the other side.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.counted import EditsCounted
from nnsight_pp.parallel.pulled import FIRST_INPUT, first_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A tensor's dtype crosses as its place in here.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# What is asked for without parts: see `core.protocols.Link.pull`.
_WHATS = ("value", "call", "last call")
# Ticket, step, what is asked for, and how many numbers say which part; these and the key follow.
_ASK = struct.Struct("<QqBH")
# The longest key, in characters, and the most numbers that are asked for so: a frame holds them.
_LONGEST_KEY = 2048
_MOST_NUMBERS = 256
# Where a tensor stands in a publication, and a pick that names one: see csrc/plain_tensors.hpp.
_IS_VALUE, _IS_FIRST_ARGUMENT = -1, -2
_FIRST_ARGUMENT = -1
_NUMBER, _SLICE, _NO_START, _NO_STOP = 0, 1, 2, 4
_MOST_ITEMS = 8
_MOST = 1 << 31


class Cannot(Exception):  # noqa: N818 - says that the other way is to be taken
    """The extension cannot be asked for this."""


class Lane(Protocol):
    """The way to one other stage."""

    def expect(self, ticket: int) -> None:
        """Keep the answer to ``ticket`` until it is taken or forgotten."""
        ...

    def ask(self, ticket: int, step: int, what: int, picks: bytes, key: str) -> None:
        """Post a question; `question` makes its last three."""
        ...

    def wait(self, ticket: int, bound_s: float) -> tuple[int, tuple[int, ...], Any, int] | None:
        """Return an answer: the dtype's code, the shape, the memory, and its size.

        None where it was forgotten, or none has come within the bound.
        """
        ...

    def forget(self, ticket: int) -> None:
        """Note that this answer comes another way, or not at all; who waits for it goes on."""
        ...

    def receive(self) -> None:
        """Deal with what comes; return when the frame holds a message for Python."""
        ...

    def sweep(self) -> None:
        """Wait for what was posted, until `stop`."""
        ...

    def stop(self) -> None:
        """Let `sweep` end."""
        ...

    def traffic(self) -> tuple[int, int, int]:
        """Return the bytes received and sent, and how many answers are waited for."""
        ...


class PlainTensors(Protocol):
    """The tensors among a rank's publications that lie in memory as they are sent."""

    def put(self, key: str, place: int, address: int, dtype: int) -> None:
        """Take the tensor at ``address``, if it is such a one, as a part of what ``key`` names.

        Args:
            key: The publication.
            place: Which part: an item's number, or all of it, or the first argument.
            address: That of the `TensorImpl`.
            dtype: Its place in `DTYPES`.
        """
        ...

    def drop(self, key: str) -> None:
        """Answer no more with it."""
        ...

    def lane(
        self, group: str, rank: int, frame: int, ask: int, answer: int, most_bytes: int
    ) -> Lane:
        """Return the way to ``rank`` of the process group named ``group``.

        Args:
            group: Its name.
            rank: The other one's rank in it.
            frame: The address of the memory that messages are read from.
            ask: What kind of message a question is.
            answer: What kind an answer is.
            most_bytes: The largest tensor that is sent.
        """
        ...

    def count(self) -> int:
        """Return how many there are."""
        ...


def table_key(request: str, number: int, location: str) -> str:
    """Return the name of an answer in `PlainTensors`: what a question must name to be given it."""
    return f"{request}\0{number}\0{location}"


def put(table: PlainTensors, key: str, value: Any) -> None:
    """Let the tensors of ``value`` be asked for without the interpreter, where they can be."""
    kind = type(value)
    if kind is torch.Tensor:
        _put(table, key, _IS_VALUE, value)
    elif kind is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        if value[0] or value[1]:  # the arguments of a call
            _put(table, key, _IS_FIRST_ARGUMENT, first_of(*value))
    elif (kind is tuple or kind is list) and len(value) <= _MOST_ITEMS:
        for place, item in enumerate(value):
            _put(table, key, place, item)


def _put(table: PlainTensors, key: str, place: int, value: Any) -> None:
    if type(value) is torch.Tensor and (code := _CODES.get(value.dtype)) is not None:
        table.put(key, place, value._cdata, code)


def question(
    key: AskKey, location: str, kind: str, picks: Sequence[Any]
) -> tuple[int, bytes, str] | None:
    """Return what `Lane.ask` is to ask for, or None where it cannot."""
    name = table_key(*key, location)
    if kind not in _WHATS or len(name) > _LONGEST_KEY:
        return None
    if not picks:
        return _WHATS.index(kind), b"", name
    try:
        numbers = [number for pick in picks for number in _numbers_of(pick)]
    except Cannot:
        return None
    if len(numbers) > _MOST_NUMBERS:
        return None
    return _WHATS.index(kind), struct.pack(f"<{len(numbers)}q", *numbers), name


def _numbers_of(pick: Any) -> list[int]:
    """Return the numbers that say ``pick``: how many indices it has, and four for each."""
    kind = type(pick)
    if kind is str and pick == FIRST_INPUT:
        return [_FIRST_ARGUMENT]
    if kind is tuple and len(pick) == 1:  # of a tuple or list it is refused, which Python does
        raise Cannot
    indices = pick if kind is tuple else (pick,)
    numbers = [len(indices)]
    for index in indices:
        numbers += _numbers_of_index(index)
    return numbers


def _numbers_of_index(index: Any) -> tuple[int, int, int, int]:
    if type(index) is int and -_MOST < index < _MOST:
        return (_NUMBER, index, 0, 0)
    if type(index) is not slice:
        raise Cannot
    ends = (index.start, index.stop, 1 if index.step is None else index.step)
    for end in ends:
        if end is not None and not (type(end) is int and -_MOST < end < _MOST):
            raise Cannot
    start, stop, step = ends
    kind = _SLICE | (_NO_START if start is None else 0) | (_NO_STOP if stop is None else 0)
    return (kind, start or 0, stop or 0, step)


def asked(head: bytes) -> tuple[int, tuple[AskKey, str, int, tuple[Any, ...], str]]:
    """Return what `Lane.ask` has sent: the ticket, and the fields of the `Question`.

    Raises:
        Exception: Whatever reading another message so raises.
    """
    ticket, step, what, count = _ASK.unpack_from(head)
    numbers = struct.unpack_from(f"<{count}q", head, _ASK.size)
    key = head[_ASK.size + 8 * count :].decode()
    request, number, location = key.rsplit("\0", 2)
    picks = tuple(_picks_of(numbers))
    return ticket, (AskKey(request, int(number)), location, step, picks, _WHATS[what])


def _picks_of(numbers: Sequence[int]) -> Iterator[Any]:
    """Yield the picks that ``numbers`` say: see `_numbers_of`."""
    at = 0
    while at < len(numbers):
        count = numbers[at]
        at += 1
        if count == _FIRST_ARGUMENT:
            yield FIRST_INPUT
            continue
        indices = []
        for begin in range(at, at + 4 * count, 4):
            kind, start, stop, step = numbers[begin : begin + 4]
            ends = (None if kind & _NO_START else start, None if kind & _NO_STOP else stop)
            indices.append(slice(*ends, step) if kind & _SLICE else start)
        at += 4 * count
        yield indices[0] if count == 1 else tuple(indices)


def tensor(code: int, shape: Sequence[int], memory: Any) -> torch.Tensor:
    """Return the tensor that lies in ``memory``, which it keeps. It is a plain one in any mode."""
    with EditsCounted():
        return torch.frombuffer(memory, dtype=DTYPES[code]).reshape(shape)
