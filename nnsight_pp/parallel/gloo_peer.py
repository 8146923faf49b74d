"""One other stage as `GlooLink` meets it: its threads, and the messages that they carry.

A gloo send ends only when the peer has posted the matching receive. So for each peer there is one
reader thread, which always has a receive posted and never waits for a send, and one writer thread
with a queue. What a message means is the link's affair.

Small messages that are queued together share a frame, and so do the answers to them: a frame costs
both ranks more than what is in it. Any other message is a frame with its body inside. A body that
does not fit is a message of its own, which goes into a receive that is posted too. Only where that
has no room either, a trip is lost: the peer posts a receive when it has read the frame. What is
sent may be shorter than its receive.

Where the extension is in use, a `Lane` stands in front of the reader: it takes questions for whole
tensors, and the answers to them, without the interpreter, and a third thread waits for what it has
posted. The reader meets only what is left.

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
    from collections.abc import Callable, Iterator

    from nnsight_pp.parallel.lane import Lane

log = logging.getLogger(__name__)

FRAME_BYTES = 16 * 1024
# What the receive for a frame's body has room for.
_BODY_BYTES = 1 << 20
# What other threads have posted is looked after by the writer: when it is awake anyway, or when it
# is more than this.
_MOST_POSTED = 64
# Magic, kind, length of the head, length of the whole body.
_PREFIX = struct.Struct("<4sBIQ")
# What fits is in the frame: the head, and the rest of the body if that fits too.
_ROOM_BYTES = FRAME_BYTES - _PREFIX.size
_MAGIC = b"nnpp"
_FRAMES, _BODIES, _LARGE = range(3)  # gloo's tags
# The last message of a peer, and several in one frame. All other kinds are the link's.
STOP = 0
_TOGETHER = 255
# What the extension sends and takes, where both ranks have it; Python takes a question, too.
PLAIN_ASK, PLAIN_ANSWER = 250, 251
# How many messages the writer takes from its queue at a time.
_MOST_TOGETHER = 64

_NO_BODY = torch.empty(0, dtype=torch.uint8)

# A message's head and the flat pieces of its payload, made by the thread that posts it.
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

    def lane_to(self, rank: int, frame: torch.Tensor) -> Lane | None:
        """Return the way to ``rank`` of the group that needs no interpreter, if there is one.

        ``frame`` is what it reads from.
        """
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
        "_answers",
        "_expected",
        "_frame",
        "_group",
        "_outbox",
        "_posted",
        "_posting",
        "_rank",
        "_receiver",
        "failure",
        "lane",
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
        # What other threads have posted, with its memory: it must live until it is sent.
        self._posted: collections.deque[list[Any]] = collections.deque()
        # What the reader will answer when it has looked through a frame; None for a single message.
        self._answers: list[tuple[int, Make]] | None = None
        self.traffic = Traffic()
        # Why it answers nothing more, once that is so.
        self.failure: str | None = None
        # What is read next; the extension reads from it as well.
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        # How whole tensors are asked for and answered without the interpreter.
        self.lane = receiver.lane_to(self._rank, self._frame)
        # A sum over many elements is cut by threads: ours must have as many as the workers'.
        num_threads = torch.get_num_threads()
        roles = {"reader": lambda: self._read(num_threads), "writer": self._write}
        if self.lane is not None:
            roles["sweeper"] = self._sweep
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

    def post(self, kind: int, make: Make) -> None:
        """Do what `send` does, without the writer: on the calling thread, ahead of what is queued.

        Posting a send does not wait for the peer, and spares a thread's turn.
        """
        self._post([(kind, make)])

    def answer(self, kind: int, make: Make) -> None:
        """Do what `post` does on the reader's thread; on any other what `send` does."""
        if threading.current_thread() is not self.threads[0]:
            self.send(kind, make)
        elif self._answers is not None:
            self._answers.append((kind, make))
        else:
            self._post([(kind, make)])

    def _post(self, items: list[tuple[int, Make]]) -> None:
        try:
            posted = self._made_and_posted(items)
        except Exception as error:
            self._receiver.lost(self, f"sending to stage {self.stage} failed: {error}")
            return
        self._posted.append(posted)
        if len(self._posted) > _MOST_POSTED or len(posted) > 1:
            self._outbox.put((STOP, None))

    def stop(self) -> None:
        """Send what is queued, say that nothing comes after it, and let the writer end."""
        self.send(STOP, lambda: (b"", []))
        self._outbox.put(None)
        if self.lane is not None:
            self.lane.stop()

    def _sweep(self) -> None:
        assert self.lane is not None
        try:
            self.lane.sweep()
        except Exception as error:
            self._receiver.lost(self, f"sending to stage {self.stage} failed: {error}")

    def _write(self) -> None:
        try:
            is_over = False
            while not is_over:
                items = self._queued()
                is_over = items[-1] is None
                messages = [
                    (item[0], item[1]) for item in items if item is not None and item[1] is not None
                ]
                posted = self._made_and_posted(messages)
                while self._posted:
                    _wait(self._posted.popleft())
                _wait(posted)
        except Exception as error:
            self._receiver.lost(self, f"sending to stage {self.stage} failed: {error}")

    def _queued(self) -> list[tuple[int, Make | None] | None]:
        """Return what is in the queue, at least one item; nothing behind the last of all."""
        items = [self._outbox.get()]
        while items[-1] is not None and len(items) < _MOST_TOGETHER:
            try:
                items.append(self._outbox.get_nowait())
            except queue.Empty:
                break
        return items

    def _made_and_posted(self, items: list[tuple[int, Make]]) -> list[Any]:
        """Return the works of these messages, without those that cannot be made."""
        messages = self._made(items)
        with self._posting:
            works = []
            for parts in messages:
                self.traffic.bytes_sent += sum(map(len, parts))
                works.append(self._group.send([parts[0]], self._rank, _FRAMES))
                for body in parts[1:]:
                    tag = _BODIES if len(body) <= _BODY_BYTES else _LARGE
                    works.append(self._group.send([body], self._rank, tag))
            return works

    def _made(self, items: list[tuple[int, Make]]) -> list[list[torch.Tensor]]:
        """Return the parts of each message, in order; small ones that follow each other in one."""
        messages: list[list[torch.Tensor]] = []
        small: list[tuple[int, bytes, list[torch.Tensor]]] = []
        room = _ROOM_BYTES
        for kind, make in items:
            try:
                head, pieces = make()
                size = _PREFIX.size + len(head) + sum(map(len, pieces))
            except Exception:
                log.exception("a message to stage %d could not be made", self.stage)
                continue
            if size > room:
                messages += _joined(small)
                small, room = [], _ROOM_BYTES
            small.append((kind, head, pieces))
            room -= size
        return messages + _joined(small)

    def _read(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        view = self._frame.numpy().data
        self._expected = self._expect()
        while True:
            try:
                message = self._receive(view)
            except Exception as error:
                if not self._receiver.is_stopping:
                    self._receiver.lost(self, f"receiving from stage {self.stage} failed: {error}")
                return
            if message is None:
                log.error("a malformed message from stage %d was dropped", self.stage)
                continue
            try:
                is_last = self._take_all(message)
            except Exception:
                log.exception("a malformed message from stage %d was dropped", self.stage)
                continue
            if self._expected is None:
                self._expected = self._expect()
            if is_last:
                self._receiver.lost(self, f"stage {self.stage} has stopped")
                return

    def _take_all(self, message: tuple[int, bytes, torch.Tensor]) -> bool:
        """Hand over what is in a message, and answer it; return whether it was the last one."""
        if message[0] != _TOGETHER:
            return self._take(*message)
        self._answers = []
        try:
            is_last = any(self._take(*one) for one in _apart(message[-1]))
        finally:
            answers, self._answers = self._answers, None
            if answers:
                self._post(answers)
        return is_last

    def _take(self, kind: int, head: bytes, payload: torch.Tensor) -> bool:
        if kind == STOP:
            return True
        try:
            self._receiver.received(self, kind, head, payload)
        except Exception:
            log.exception("a malformed message from stage %d was dropped", self.stage)
        return False

    def _receive(self, view: memoryview) -> tuple[int, bytes, torch.Tensor] | None:
        """Return the next message; None for one that is not ours."""
        if self.lane is None:
            self._group.recv([self._frame], self._rank, _FRAMES).wait()
        else:
            self.lane.receive()
        magic, kind, head_length, length = _PREFIX.unpack_from(view)
        if magic != _MAGIC:
            return None
        begin = _PREFIX.size + (head_length if head_length <= _ROOM_BYTES else 0)
        head = bytes(view[_PREFIX.size : begin])
        if length <= _ROOM_BYTES:
            body = _as_tensor(view[begin : _PREFIX.size + length])
        else:
            body = self._body(length - len(head))
        if head_length > _ROOM_BYTES:
            head, body = body[:head_length].numpy().tobytes(), body[head_length:]
        self.traffic.bytes_received += length
        return kind, head, body

    def _body(self, length: int) -> torch.Tensor:
        """Return a body that its frame had no room for."""
        if length > _BODY_BYTES:
            body = torch.empty(length, dtype=torch.uint8, device="cpu")
            self._group.recv([body], self._rank, _LARGE).wait()
            return body
        body, work = self._expected or self._expect()
        # The next one is posted when this message has been handed over: somebody waits for it.
        self._expected = None
        work.wait()
        return body[:length]

    def _expect(self) -> tuple[torch.Tensor, Any]:
        """Post the receive for the next body; return its memory and its work."""
        body = torch.empty(_BODY_BYTES, dtype=torch.uint8, device="cpu")
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
    if length <= _ROOM_BYTES:
        return [_as_tensor(prefix, head, *[piece.numpy().data for piece in pieces])]
    # One piece goes as it is, without a copy.
    return [_as_tensor(prefix, head), pieces[0] if len(pieces) == 1 else torch.cat(pieces)]


def _joined(messages: list[tuple[int, bytes, list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
    """Return the parts of one message that holds all these, or of the only one."""
    if len(messages) < 2:
        return [_message(*one) for one in messages]
    pieces: list[torch.Tensor] = []
    for kind, head, own in messages:
        length = len(head) + sum(map(len, own))
        pieces += [_as_tensor(_PREFIX.pack(_MAGIC, kind, len(head), length) + head), *own]
    return [_message(_TOGETHER, b"", pieces)]


def _apart(frame: torch.Tensor) -> Iterator[tuple[int, bytes, torch.Tensor]]:
    """Yield the messages that `_joined` has put into one."""
    view, at = frame.numpy().data, 0
    while at < len(frame):
        _, kind, head_length, length = _PREFIX.unpack_from(view, at)
        begin = at + _PREFIX.size
        at = begin + length
        head_end = begin + head_length
        yield kind, bytes(view[begin:head_end]), _as_tensor(view[head_end:at])


def _as_tensor(*parts: bytes | memoryview) -> torch.Tensor:
    """Return ``parts`` behind each other, in memory of its own that any dtype may start at."""
    data = bytearray().join(parts)
    return torch.frombuffer(data, dtype=torch.uint8) if data else _NO_BODY
