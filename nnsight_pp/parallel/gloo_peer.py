"""One other stage as `GlooLink` meets it: two threads, and the messages that they carry.

gloo's `send` returns only when the peer has posted the matching receive, so for each peer there is
one reader thread, which always has a receive posted and never sends, and one writer thread with a
queue. What a message means is the link's affair.

A message is one frame of fixed size with its body inside; only a body that does not fit takes a
second message.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

FRAME_BYTES = 16 * 1024
# Magic, kind, length of the head, length of the whole body.
_PREFIX = struct.Struct("<4sBIQ")
# What fits is in the frame: the head, and the rest of the body if that fits too. Else a second
# message has it, with the head where that does not fit.
_ROOM_BYTES = FRAME_BYTES - _PREFIX.size
_MAGIC = b"nnpp"
# The last message of a peer. All other kinds are the link's.
STOP = 0

# A message's head and the flat pieces of its payload, made by the writer's thread.
Make: TypeAlias = "Callable[[], tuple[bytes, list[torch.Tensor]]]"


@dataclass(slots=True)
class Traffic:
    """What crossed between this rank and one peer."""

    pulls: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0


class Receiver(Protocol):
    """Who is told what a peer has sent; on the peer's reader or writer thread."""

    @property
    def is_stopping(self) -> bool:
        """Whether this rank leaves, so that lost peers are no news."""
        ...

    def received(self, peer: GlooPeer, kind: int, head: bytes, payload: torch.Tensor) -> None:
        """Take a message. What this raises makes it a malformed one."""
        ...

    def lost(self, peer: GlooPeer, text: str) -> None:
        """Note that ``peer`` will send nothing more, and why."""
        ...


@final
class GlooPeer:
    """The threads that talk to one other stage, and their queue.

    Args:
        stage: The other stage.
        rank: Its global rank.
        group: The gloo group of the column.
        receiver: Who is told what it sends.
    """

    __slots__ = (
        "_group",
        "_outbox",
        "_rank",
        "_receiver",
        "failure",
        "stage",
        "threads",
        "traffic",
    )

    def __init__(self, stage: int, rank: int, group: Any, receiver: Receiver) -> None:
        self.stage = stage
        self._rank = rank
        self._group = group
        self._receiver = receiver
        self._outbox: queue.SimpleQueue[tuple[int, Make] | None] = queue.SimpleQueue()
        self.traffic = Traffic()
        # Why it answers nothing more, once that is so.
        self.failure: str | None = None
        # A sum over many elements is cut by threads: ours must have as many as the workers'.
        num_threads = torch.get_num_threads()
        roles = {"reader": lambda: self._read(num_threads), "writer": self._write}
        self.threads = [
            threading.Thread(target=run, name=f"nnsight_pp {role} of stage {stage}", daemon=True)
            for role, run in roles.items()
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    def send(self, kind: int, make: Make) -> None:
        """Let the writer make a message and send it; return at once."""
        self._outbox.put((kind, make))

    def stop(self) -> None:
        """Send what is queued, say that nothing comes after it, and let the writer end."""
        self.send(STOP, lambda: (b"", []))
        self._outbox.put(None)

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            kind, make = item
            try:
                head, pieces = make()
            except Exception:
                log.exception("a message to stage %d could not be made", self.stage)
                continue
            try:
                self._send(kind, head, pieces)
            except Exception as error:
                self._receiver.lost(self, f"sending to stage {self.stage} failed: {error}")
                return

    def _send(self, kind: int, head: bytes, pieces: list[torch.Tensor]) -> None:
        frame, body, length = _message(kind, head, pieces)
        dist.send(frame, self._rank, group=self._group)
        if body is not None:
            dist.send(body, self._rank, group=self._group)
        self.traffic.bytes_sent += length

    def _read(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        while True:
            try:
                message = self._receive(frame)
            except Exception as error:
                if not self._receiver.is_stopping:
                    self._receiver.lost(self, f"receiving from stage {self.stage} failed: {error}")
                return
            if message is None:
                log.error("a malformed message from stage %d was dropped", self.stage)
                continue
            if message[0] == STOP:
                self._receiver.lost(self, f"stage {self.stage} has stopped")
                return
            try:
                self._receiver.received(self, *message)
            except Exception:
                log.exception("a malformed message from stage %d was dropped", self.stage)

    def _receive(self, frame: torch.Tensor) -> tuple[int, bytes, torch.Tensor] | None:
        """Return the next message; None for one that is not ours."""
        dist.recv(frame, self._rank, group=self._group)
        magic, kind, head_length, length = _PREFIX.unpack(_as_bytes(frame[: _PREFIX.size]))
        if magic != _MAGIC:
            return None
        begin = _PREFIX.size + (head_length if head_length <= _ROOM_BYTES else 0)
        head = _as_bytes(frame[_PREFIX.size : begin])
        if length <= _ROOM_BYTES:
            body = frame[begin : _PREFIX.size + length].clone()
        else:
            body = torch.empty(length - len(head), dtype=torch.uint8)
            dist.recv(body, self._rank, group=self._group)
        if head_length > _ROOM_BYTES:
            head, body = _as_bytes(body[:head_length]), body[head_length:]
        self.traffic.bytes_received += length
        return kind, head, body


def _message(
    kind: int, head: bytes, pieces: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return the frame, what follows it, and the length of the whole body."""
    length = len(head) + sum(len(piece) for piece in pieces)
    frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    frame[: _PREFIX.size] = _as_tensor(_PREFIX.pack(_MAGIC, kind, len(head), length))
    begin = _PREFIX.size + len(head)
    if len(head) > _ROOM_BYTES:
        return frame, torch.cat([_as_tensor(head), *pieces]), length
    frame[_PREFIX.size : begin] = _as_tensor(head)
    if length > _ROOM_BYTES:
        # One piece goes as it is, without a copy.
        return frame, pieces[0] if len(pieces) == 1 else torch.cat(pieces), length
    if pieces:
        frame[begin : _PREFIX.size + length] = torch.cat(pieces)
    return frame, None, length


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_bytes(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()
