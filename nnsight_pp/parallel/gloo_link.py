"""The link between the stages of one tensor-parallel column, over a gloo group of its own.

gloo's `send` returns only when the peer has posted the matching receive, so the forward thread
never touches gloo. For each peer there is one reader thread, which always has a receive posted and
never sends, and one writer thread with a queue. Neither touches a worker: they resolve pending
answers and look answers up in `Publications`.

A message is one frame of fixed size with its body inside; only a body that does not fit takes a
second message. gloo closes a pair when a timeout of its own runs out, so the group is made without
one, and deadlines sit on `PendingAnswer`.

Source: vllm 0.32.0 has its own groups; none of them is used or shared here.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from nnsight_pp.core.ask import AskKey
from nnsight_pp.parallel.pending import PendingAnswer
from nnsight_pp.parallel.publications import Answer, Publications, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nnsight_pp.core.location import Location

log = logging.getLogger(__name__)

_FRAME_BYTES = 16 * 1024
_ALIGN = 16
# Magic, kind, length of the head, length of the whole body.
_PREFIX = struct.Struct("<4sBIQ")
# What fits is in the frame: the head, and the rest of the body if that fits too. Else a second
# message has it, with the head where that does not fit.
_ROOM_BYTES = _FRAME_BYTES - _PREFIX.size
_MAGIC = b"nnpp"
_ASK, _ANSWER, _RELEASE, _STOP, _LET_GO = range(5)
_NEVER = timedelta(days=365)


@contextmanager
def all_cores() -> Iterator[None]:
    """Let threads that are started inside run on every core, not only on the caller's.

    A rank may be bound to one core, and threads inherit that: they would fight the forward for it.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        yield
    finally:
        os.sched_setaffinity(0, own)


def new_group(columns: Sequence[Sequence[int]], rank: int) -> Any:
    """Make one gloo group per tensor-parallel column; return the one that holds ``rank``.

    Every rank of the world must call this with the same columns.
    """
    own = None
    with all_cores():
        for ranks in columns:
            group = dist.new_group(list(ranks), backend="gloo", timeout=_NEVER)
            if rank in ranks:
                own = group
    return own


@dataclass(slots=True)
class _Traffic:
    """What crossed between this rank and one peer."""

    pulls: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0


@dataclass(slots=True)
class _Peer:
    """One other stage."""

    stage: int
    rank: int
    outbox: queue.SimpleQueue[tuple[int, Callable[[], tuple[bytes, list[torch.Tensor]]]] | None]
    traffic: _Traffic = field(default_factory=_Traffic)
    threads: list[threading.Thread] = field(default_factory=list)
    failure: str | None = None


@final
class GlooLink:
    """Publish and pull over gloo.

    Args:
        stage: This rank's stage.
        ranks: The global rank of each stage in this rank's column.
        group: The gloo group of the column.
        publications: This rank's answers.
        encode: Turns a value into a header and flat pieces.
        decode: Turns a header and a payload into the value.
        bound_s: The longest wait for an answer.
        most_bytes: The largest answer that is sent.
        ran: Where this rank is, in words.
        sums_alike: See `core.protocols.Link`.
    """

    def __init__(  # noqa: PLR0913 - the one visible place where an engine wires a link
        self,
        stage: int,
        ranks: Sequence[int],
        group: Any,
        publications: Publications,
        *,
        encode: Callable[[Any], tuple[bytes, list[torch.Tensor]]],
        decode: Callable[[bytes, torch.Tensor], Any],
        bound_s: float,
        most_bytes: int,
        ran: str,
        sums_alike: bool = True,
    ) -> None:
        self.sums_alike = sums_alike
        # A sum over many elements is cut by threads: the link's must have as many as the workers'.
        self._num_threads = torch.get_num_threads()
        self._stage = stage
        self._group = group
        self._own = publications
        self._encode = encode
        self._decode = decode
        self._bound_s = bound_s
        self._most_bytes = most_bytes
        self._ran = ran
        self._lock = threading.Lock()
        self._tickets = 0
        # By ticket: the owner, the request, and who waits.
        self._pending: dict[int, tuple[int, str, PendingAnswer]] = {}
        self._is_stopping = False
        self._peers = {
            peer: _Peer(peer, rank, queue.SimpleQueue())
            for peer, rank in enumerate(ranks)
            if peer != stage
        }
        with all_cores():
            for peer in self._peers.values():
                for role, target in (("reader", self._read), ("writer", self._write)):
                    thread = threading.Thread(
                        target=target,
                        args=(peer,),
                        name=f"nnsight_pp {role} of stage {peer.stage}",
                        daemon=True,
                    )
                    peer.threads.append(thread)
                    thread.start()

    # -- the forward thread's side -------------------------------------------------------------

    def publish(self, key: AskKey, location: Location, value: Any) -> None:
        """See `core.protocols.Link`."""
        self._own.publish(key, location, value)

    def close(self, request: str, step: int) -> None:
        """See `core.protocols.Link`."""
        self._own.close(request, step)

    def fail(self, request: str, text: str) -> None:
        """See `core.protocols.Link`."""
        self._own.fail(request, text)

    def pull(
        self,
        key: AskKey,
        owner: int,
        location: Location,
        step: int,
        picks: Sequence[Any],
        kind: str = "value",
    ) -> PendingAnswer:
        """See `core.protocols.Link`. Returns at once."""
        peer = self._peers[owner]
        pending = PendingAnswer(location, step, owner, self._bound_s, self._ran)
        with self._lock:
            ticket = self._tickets
            self._tickets += 1
            self._pending[ticket] = (owner, key.request, pending)
            peer.traffic.pulls += 1
            failure = peer.failure
        if failure is not None:
            self._resolve(ticket, Answer("error", failure))
        else:
            body = pickle.dumps((ticket, *key, str(location), step, tuple(picks), kind))
            peer.outbox.put((_ASK, lambda: (body, [])))
        return pending

    def let_go(self, request: str, owner: int, asks: Sequence[tuple[int, int | None]]) -> None:
        """See `core.protocols.Link`."""
        self._peers[owner].outbox.put((_LET_GO, lambda: (pickle.dumps((request, asks)), [])))

    def release(self, request: str) -> None:
        """See `core.protocols.Link`."""
        self._own.end(request)
        with self._lock:  # nobody waits for these any more
            for ticket in [t for t, (_, of, _) in self._pending.items() if of == request]:
                del self._pending[ticket]
        for peer in self._peers.values():
            peer.outbox.put((_RELEASE, lambda: (request.encode(), [])))

    def stop(self) -> None:
        """Tell the peers that this rank is leaving; its own threads end when they leave too."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for peer in self._peers.values():
            peer.outbox.put((_STOP, lambda: (b"", [])))
            peer.outbox.put(None)

    def join(self, bound_s: float) -> bool:
        """Wait for the threads, all together at most ``bound_s``; return whether they have ended.

        Call it after `stop`.
        """
        deadline = time.monotonic() + bound_s
        threads = [thread for peer in self._peers.values() for thread in peer.threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def statistics(self) -> dict[str, Any]:
        """Return pending pulls, published answers, and the traffic with each stage."""
        with self._lock:
            traffic = {
                peer.stage: {
                    "pulls": peer.traffic.pulls,
                    "bytes_received": peer.traffic.bytes_received,
                    "bytes_sent": peer.traffic.bytes_sent,
                }
                for peer in self._peers.values()
            }
            return {"pending": len(self._pending), "traffic": traffic, **self._own.statistics()}

    # -- the threads ---------------------------------------------------------------------------

    def _write(self, peer: _Peer) -> None:
        while (item := peer.outbox.get()) is not None:
            kind, make = item
            try:
                head, pieces = make()
            except Exception:
                log.exception("a message to stage %d could not be made", peer.stage)
                continue
            try:
                self._send(peer, kind, head, pieces)
            except Exception as error:
                self._lose(peer, f"sending to stage {peer.stage} failed: {error}")
                return

    def _send(self, peer: _Peer, kind: int, head: bytes, pieces: list[torch.Tensor]) -> None:
        frame, body, length = _message(kind, head, pieces)
        dist.send(frame, peer.rank, group=self._group)
        if body is not None:
            dist.send(body, peer.rank, group=self._group)
        peer.traffic.bytes_sent += length

    def _read(self, peer: _Peer) -> None:
        torch.set_num_threads(self._num_threads)
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        while True:
            try:
                dist.recv(frame, peer.rank, group=self._group)
                magic, kind, head_length, length = _PREFIX.unpack(_as_bytes(frame[: _PREFIX.size]))
                if magic != _MAGIC:
                    log.error("a malformed message from stage %d was dropped", peer.stage)
                    continue
                begin = _PREFIX.size + (head_length if head_length <= _ROOM_BYTES else 0)
                head = _as_bytes(frame[_PREFIX.size : begin])
                if length <= _ROOM_BYTES:
                    body = frame[begin : _PREFIX.size + length].clone()
                else:
                    body = torch.empty(length - len(head), dtype=torch.uint8)
                    dist.recv(body, peer.rank, group=self._group)
                if head_length > _ROOM_BYTES:
                    head, body = _as_bytes(body[:head_length]), body[head_length:]
            except Exception as error:
                if not self._is_stopping:
                    self._lose(peer, f"receiving from stage {peer.stage} failed: {error}")
                return
            peer.traffic.bytes_received += length
            if kind == _STOP:
                self._lose(peer, f"stage {peer.stage} has stopped")
                return
            try:
                self._received(peer, kind, head, body)
            except Exception:
                log.exception("a malformed message from stage %d was dropped", peer.stage)

    def _received(self, peer: _Peer, kind: int, head: bytes, payload: torch.Tensor) -> None:
        if kind == _RELEASE:
            self._own.released(head.decode(), peer.stage)
        elif kind == _LET_GO:
            self._own.let_go(peer.stage, *pickle.loads(head))
        elif kind == _ASK:
            ticket, request, number, location, step, picks, what = pickle.loads(head)
            question = Question(AskKey(request, number), location, step, picks, what)
            self._own.ask(question, lambda answer: self._reply(peer, ticket, answer))
        elif kind == _ANSWER:
            ticket, what, text, header = pickle.loads(head)
            if what == "value":
                try:
                    answer = Answer(what, self._decode(header, payload))
                except Exception as error:
                    answer = Answer("error", f"{type(error).__name__}: {error}")
            else:
                answer = Answer(what, text)
            self._resolve(ticket, answer, len(payload))
        else:
            raise ValueError(f"unknown kind {kind}")

    def _reply(self, peer: _Peer, ticket: int, answer: Answer) -> None:
        if peer.failure is None:
            peer.outbox.put((_ANSWER, lambda: self._encoded(ticket, answer)))

    def _encoded(self, ticket: int, answer: Answer) -> tuple[bytes, list[torch.Tensor]]:
        if answer.kind != "value":
            return pickle.dumps((ticket, answer.kind, answer.value, b"")), []
        try:
            header, pieces = self._encode(answer.value)
        except Exception as error:
            text = f"it cannot be pickled ({type(error).__name__}: {error})"
            return pickle.dumps((ticket, "error", text, b"")), []
        size = len(header) + sum(len(piece) for piece in pieces)
        if size > self._most_bytes:
            text = f"it has {size} bytes, above the limit of {self._most_bytes}"
            return pickle.dumps((ticket, "error", text, b"")), []
        head = pickle.dumps((ticket, "value", "", header))
        # A tensor must start at a multiple of its element's size; pickle ignores what follows it.
        return head + bytes(-len(head) % _ALIGN), pieces

    def _resolve(self, ticket: int, answer: Answer, num_bytes: int = 0) -> None:
        with self._lock:
            found = self._pending.pop(ticket, None)
        if found is not None:  # else its request was released, or the peer was lost
            found[-1].resolve(answer, num_bytes)

    def _lose(self, peer: _Peer, text: str) -> None:
        """Answer everybody who waits for ``peer``: it will not."""
        with self._lock:
            peer.failure = peer.failure or text
            lost = [t for t, (owner, _, _) in self._pending.items() if owner == peer.stage]
        self._own.gone(peer.stage)
        for ticket in lost:
            self._resolve(ticket, Answer("error", text))


def _message(
    kind: int, head: bytes, pieces: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return the frame, what follows it, and the length of the whole body."""
    length = len(head) + sum(len(piece) for piece in pieces)
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
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
