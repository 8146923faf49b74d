"""Published tensors that cross without the interpreter: what the compiled `Lane` is told and gives.

Most pulls are of one whole tensor that exists by now. The extension knows these, answers them on
the owner's reader thread without the GIL, and wakes the forward thread that waits for one. All
other questions and answers take the way through Python, as all do where there is no extension.
`csrc/lane.cpp` is the other side.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.counted import EditsCounted

if TYPE_CHECKING:
    from collections.abc import Sequence

# A tensor's dtype crosses as its place in here.
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# What is asked for without parts: see `core.protocols.Link.pull`.
_WHATS = ("value", "call", "last call")
# Ticket, step, and what is asked for; the key of the table follows.
_ASK = struct.Struct("<QqB")
# The longest key that is asked for so, in characters: a frame must hold it.
_LONGEST_KEY = 2048


class Lane(Protocol):
    """The way to one other stage."""

    def expect(self, ticket: int) -> None:
        """Keep the answer to ``ticket`` until it is taken or forgotten."""
        ...

    def ask(self, ticket: int, step: int, what: int, key: str) -> None:
        """Post a question."""
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

    def put(self, key: str, address: int, dtype: int) -> None:
        """Take the tensor at ``address``, if it is such a one."""
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
    """Let ``value`` be asked for without the interpreter, if it is a tensor that can be."""
    if type(value) is torch.Tensor and (code := _CODES.get(value.dtype)) is not None:
        table.put(key, value._cdata, code)


def question(key: AskKey, location: str, kind: str) -> tuple[int, str] | None:
    """Return what `Lane.ask` is to ask for, or None where it cannot."""
    name = table_key(*key, location)
    return (_WHATS.index(kind), name) if kind in _WHATS and len(name) <= _LONGEST_KEY else None


def asked(head: bytes) -> tuple[int, AskKey, str, int, str]:
    """Return what `Lane.ask` has sent: the ticket, the ask, its location, step, and what is asked.

    Raises:
        Exception: Whatever reading another message so raises.
    """
    ticket, step, what = _ASK.unpack_from(head)
    request, number, location = head[_ASK.size :].decode().rsplit("\0", 2)
    return ticket, AskKey(request, int(number)), location, step, _WHATS[what]


def tensor(code: int, shape: Sequence[int], memory: Any) -> torch.Tensor:
    """Return the tensor that lies in ``memory``, which it keeps. It is a plain one in any mode."""
    with EditsCounted():
        return torch.frombuffer(memory, dtype=DTYPES[code]).reshape(shape)
