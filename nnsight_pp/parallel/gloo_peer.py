"""One other stage as `GlooLink` meets it: two threads, and the messages that they carry.

A gloo send ends only when the peer has posted the matching receive. So for each peer there is one
reader thread, which always has a receive posted and never waits for a send, and one writer thread
with a queue. What a message means is the link's affair.

A message is a frame with its body inside. A body that does not fit is a message of its own, which
goes into a receive that is posted too. Only where that has no room either, a trip is lost: the peer
posts a receive when it has read the frame. What is sent may be shorter than its receive.

Source: torch 2.13.0, gloo transport/tcp/pair.cc: at most the receive's length is taken.
"""

from __future__ import annotations

import collections
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
# What the receive for a frame's body has room for.
_BODY_BYTES = 1 << 20
# Answers that the reader has posted are looked after by the writer: when it is awake anyway, or
# when they are more than this.
_MOST_POSTED = 64
# Magic, kind, length of the head, length of the whole body.
_PREFIX = struct.Struct("<4sBIQ")
# What fits is in the frame: the head, and the rest of the body if that fits too.
_ROOM_BYTES = FRAME_BYTES - _PREFIX.size
_MAGIC = b"nnpp"
_FRAMES, _BODIES, _LARGE = range(3)  # gloo's tags
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
        "_expected",
        "_group",
        "_outbox",
        "_posted",
        "_posting",
        "_rank",
        "_receiver",
        "failure",
        "stage",
        "threads",
        "traffic",
    )

    def __init__(self, stage: int, rank: int, group: Any, receiver: Receiver) -> None:
        self.stage = stage
        self._rank = dist.get_group_rank(group, rank)
        self._group = group
        self._receiver = receiver
        self._outbox: queue.SimpleQueue[tuple[int, Make | None] | None] = queue.SimpleQueue()
        # Held while a message is posted, so that its two parts stay together.
        self._posting = threading.Lock()
        # What the reader has posted, with its memory: it must live until it is sent.
        self._posted: collections.deque[list[Any]] = collections.deque()
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

    def answer(self, kind: int, make: Make) -> None:
        """Do what `send` does; on the reader's thread, without the writer's.

        Posting a send does not wait for the peer, and spares a thread's turn.
        """
        if threading.current_thread() is not self.threads[0]:
            self.send(kind, make)
            return
        posted = self._made_and_posted(kind, make)
        if posted is not None:
            self._posted.append(posted)
        if len(self._posted) > _MOST_POSTED or (posted is not None and len(posted) > 1):
            self._outbox.put((STOP, None))

    def stop(self) -> None:
        """Send what is queued, say that nothing comes after it, and let the writer end."""
        self.send(STOP, lambda: (b"", []))
        self._outbox.put(None)

    def _write(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                kind, make = item
                posted = None if make is None else self._made_and_posted(kind, make)
                while self._posted:
                    _wait(self._posted.popleft())
                _wait(posted or [])
        except Exception as error:
            self._receiver.lost(self, f"sending to stage {self.stage} failed: {error}")

    def _made_and_posted(self, kind: int, make: Make) -> list[Any] | None:
        """Return the works of a message; None for one that could not be made."""
        try:
            head, pieces = make()
            parts = _message(kind, head, pieces)
        except Exception:
            log.exception("a message to stage %d could not be made", self.stage)
            return None
        with self._posting:
            self.traffic.bytes_sent += sum(map(len, parts))
            works = [self._group.send([parts[0]], self._rank, _FRAMES)]
            for body in parts[1:]:
                tag = _BODIES if len(body) <= _BODY_BYTES else _LARGE
                works.append(self._group.send([body], self._rank, tag))
            return works

    def _read(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        view = frame.numpy().data
        self._expected = self._expect()
        while True:
            try:
                message = self._receive(frame, view)
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

    def _receive(
        self, frame: torch.Tensor, view: memoryview
    ) -> tuple[int, bytes, torch.Tensor] | None:
        """Return the next message; None for one that is not ours."""
        self._group.recv([frame], self._rank, _FRAMES).wait()
        magic, kind, head_length, length = _PREFIX.unpack_from(view)
        if magic != _MAGIC:
            return None
        begin = _PREFIX.size + (head_length if head_length <= _ROOM_BYTES else 0)
        head = bytes(view[_PREFIX.size : begin])
        if length <= _ROOM_BYTES:
            body = frame[begin : _PREFIX.size + length].clone()
        else:
            body = self._body(length - len(head))
        if head_length > _ROOM_BYTES:
            head, body = body[:head_length].numpy().tobytes(), body[head_length:]
        self.traffic.bytes_received += length
        return kind, head, body

    def _body(self, length: int) -> torch.Tensor:
        """Return a body that its frame had no room for."""
        if length > _BODY_BYTES:
            body = torch.empty(length, dtype=torch.uint8)
            self._group.recv([body], self._rank, _LARGE).wait()
            return body
        body, work = self._expected
        work.wait()
        self._expected = self._expect()
        return body[:length]

    def _expect(self) -> tuple[torch.Tensor, Any]:
        """Post the receive for the next body; return its memory and its work."""
        body = torch.empty(_BODY_BYTES, dtype=torch.uint8)
        return body, self._group.recv([body], self._rank, _BODIES)


def _wait(works: list[Any]) -> None:
    """Return when what was posted is sent."""
    for work in works:
        work.wait()


def _message(kind: int, head: bytes, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the frame, and what follows it in a second message."""
    length = len(head) + sum(map(len, pieces))
    prefix = _PREFIX.pack(_MAGIC, kind, len(head), length)
    if len(head) > _ROOM_BYTES:
        return [_as_tensor(prefix), torch.cat([_as_tensor(head), *pieces])]
    frame = _as_tensor(prefix + head)
    if not pieces:
        return [frame]
    if length <= _ROOM_BYTES:
        return [torch.cat([frame, *pieces])]
    # One piece goes as it is, without a copy.
    return [frame, pieces[0] if len(pieces) == 1 else torch.cat(pieces)]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
