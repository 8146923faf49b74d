"""The link between the stages of one tensor-parallel column, over a gloo group of its own.

The forward thread never waits in gloo: the threads of `gloo_peer` do, it only posts the question
whose answer it needs next. Neither thread touches a worker: they resolve pending answers and look
answers up in `Publications`. gloo closes a pair when a timeout of its own runs out, so the group is
made without one, and deadlines sit on `PendingAnswer`.

Source: vllm 0.32.0 has its own groups; none of them is used or shared here.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from nnsight_pp.core.ask import AskKey
from nnsight_pp.parallel import lane
from nnsight_pp.parallel.gloo_peer import PLAIN_ANSWER, PLAIN_ASK, STOP, GlooPeer
from nnsight_pp.parallel.pending import PendingAnswer
from nnsight_pp.parallel.publications import Answer, Publications, Question
from nnsight_pp.parallel.waits import report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nnsight_pp.core.location import Location, Visit

_ALIGN = 16
_ASK, _ANSWER, _RELEASE, _LET_GO, _FAILED = range(STOP + 1, STOP + 6)
# How an answer begins: what it answers, and whether it is a value.
_TICKET = struct.Struct("<Q?")
_NEVER = timedelta(days=365)
# How long a stage is waited for that has just let another wait run out: all requests of a step wait
# one after the other, and the engine has a bound of its own.
_SILENT_S = 1.0


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
        casts_copy: See there.
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
        casts_copy: bool = True,
    ) -> None:
        self.sums_alike, self.casts_copy = sums_alike, casts_copy
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
        # Stages that have let a wait run out and have sent nothing since.
        self._silent: set[int] = set()
        self.is_stopping = False
        with all_cores():
            self._peers = {
                peer: GlooPeer(peer, rank, group, self)
                for peer, rank in enumerate(ranks)
                if peer != stage
            }
            for peer in self._peers.values():
                peer.start()

    # -- the forward thread's side -------------------------------------------------------------

    def publish(self, key: AskKey, location: Location, value: Any) -> None:
        """See `core.protocols.Link`."""
        self._own.publish(key, location, value)

    def close(self, request: str, step: int) -> None:
        """See `core.protocols.Link`."""
        self._own.close(request, step)

    def fail(self, request: str, text: str, *, is_stop: bool = False) -> None:
        """See `core.protocols.Link`. The other stages are told that they need not go on.

        A stop is not told: the threads that send and receive it would take the interpreter from
        two forwards.
        """
        self._own.fail(request, text)
        for peer in () if is_stop else self._peers.values():
            peer.send(_FAILED, lambda: (request.encode(), []))

    def has_failed_elsewhere(self, request: str) -> bool:
        """Whether another stage has said by now that the worker of ``request`` has raised there.

        CAUTION: it depends on timing. Nothing that ranks do together may depend on it.
        """
        return self._own.has_failed_elsewhere(request)

    def pull(
        self,
        key: AskKey,
        owner: int,
        location: Location,
        step: int,
        picks: Sequence[Any],
        kind: str = "value",
        *,
        at_once: bool = False,
    ) -> PendingAnswer:
        """See `core.protocols.Link`."""
        peer = self._peers[owner]
        bound_s = min(self._bound_s, _SILENT_S) if owner in self._silent else self._bound_s
        pending = PendingAnswer(
            location, step, owner, bound_s, self._ran, lambda v: self._late(key.request, owner, v)
        )
        name = str(location)
        plain = lane.question(key, name, kind, picks) if at_once else None
        way = peer.lane if plain is not None else None
        with self._lock:
            ticket = self._tickets
            self._tickets += 1
            if way is not None:  # before anybody can resolve it
                way.expect(ticket)
                pending.by_lane(way, ticket, self._taken)
            self._pending[ticket] = (owner, key.request, pending)
            peer.traffic.pulls += 1
            failure = peer.failure
        if failure is not None:
            self._resolve(ticket, Answer("error", failure))
        elif way is not None and plain is not None:
            try:
                way.ask(ticket, step, *plain)
            except Exception as error:
                self.lost(peer, f"sending to stage {owner} failed: {error}")
        else:
            head = pickle.dumps((ticket, *key, name, step, tuple(picks), kind))
            (peer.post if at_once else peer.send)(_ASK, lambda: (head, []))
        return pending

    def _taken(self, ticket: int) -> None:
        """Note that the forward thread has its answer from the extension."""
        with self._lock:
            found = self._pending.pop(ticket, None)
        if found is not None:
            self._silent.discard(found[0])

    def _late(self, request: str, owner: int, visit: Visit) -> str:
        """Note that ``owner`` is silent; return how far all stages are with ``request``."""
        self._silent.add(owner)
        own = self._stage, self._own.standing(request)
        wait = f"waits for {visit} of stage {owner}"
        return report(self.pull, request, own, self._peers, wait)

    def let_go(self, request: str, owner: int, asks: Sequence[tuple[int, int | None]]) -> None:
        """See `core.protocols.Link`."""
        self._peers[owner].send(_LET_GO, lambda: (pickle.dumps((request, asks)), []))

    def release(self, request: str) -> None:
        """See `core.protocols.Link`."""
        self._own.end(request)
        with self._lock:  # nobody waits for these any more
            for ticket in [t for t, (_, of, _) in self._pending.items() if of == request]:
                owner, _, _ = self._pending.pop(ticket)
                way = self._peers[owner].lane
                if way is not None:
                    way.forget(ticket)
        for peer in self._peers.values():
            peer.send(_RELEASE, lambda: (request.encode(), []))

    def stop(self) -> None:
        """Tell the peers that this rank is leaving; its own threads end when they leave too."""
        if self.is_stopping:
            return
        self.is_stopping = True
        for peer in self._peers.values():
            peer.stop()

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
            traffic = {}
            for peer in self._peers.values():
                own = (0, 0, 0) if peer.lane is None else peer.lane.traffic()
                traffic[peer.stage] = {
                    "pulls": peer.traffic.pulls,
                    "bytes_received": peer.traffic.bytes_received + own[0],
                    "bytes_sent": peer.traffic.bytes_sent + own[1],
                }
            return {"pending": len(self._pending), "traffic": traffic, **self._own.statistics()}

    # -- the peers' threads --------------------------------------------------------------------

    def lane_to(self, rank: int, frame: torch.Tensor) -> lane.Lane | None:
        plain = self._own.plain
        if plain is None or not self.sums_alike:  # what it brings stays where it arrives
            return None
        name, address = self._group.group_name, frame.data_ptr()
        return plain.lane(name, rank, address, PLAIN_ASK, PLAIN_ANSWER, self._most_bytes)

    def received(self, peer: GlooPeer, kind: int, head: bytes, payload: torch.Tensor) -> None:
        self._silent.discard(peer.stage)
        if kind == _RELEASE:
            self._own.released(head.decode(), peer.stage)
        elif kind == _FAILED:
            self._own.failed_elsewhere(head.decode())
        elif kind == _LET_GO:
            self._own.let_go(peer.stage, *pickle.loads(head))
        elif kind == _ASK:
            ticket, request, number, location, step, picks, what = pickle.loads(head)
            question = Question(AskKey(request, number), location, step, picks, what)
            self._own.ask(question, lambda answer: self._reply(peer, ticket, answer))
        elif kind == PLAIN_ASK:  # the extension has no answer yet, or none that it can give
            ticket, fields = lane.asked(head)
            self._own.ask(Question(*fields), lambda answer: self._reply(peer, ticket, answer))
        elif kind == _ANSWER:
            ticket, is_value = _TICKET.unpack_from(head)
            header = head[_TICKET.size :]
            if is_value:
                try:
                    answer = Answer("value", self._decode(header, payload))
                except Exception as error:
                    answer = Answer("error", f"{type(error).__name__}: {error}")
            else:
                answer = Answer(*pickle.loads(header))
            self._resolve(ticket, answer, len(payload))
        else:
            raise ValueError(f"unknown kind {kind}")

    def _reply(self, peer: GlooPeer, ticket: int, answer: Answer) -> None:
        if peer.failure is None:
            peer.answer(_ANSWER, lambda: self._encoded(ticket, answer))

    def _encoded(self, ticket: int, answer: Answer) -> tuple[bytes, list[torch.Tensor]]:
        if answer.kind == "value":
            try:
                header, pieces = self._encode(answer.value)
            except Exception as error:
                text = f"it cannot be pickled ({type(error).__name__}: {error})"
            else:
                size = len(header) + sum(map(len, pieces))
                if size <= self._most_bytes:
                    head = _TICKET.pack(ticket, True) + header
                    # A tensor must start at a multiple of its element's size; pickle ignores what
                    # follows it.
                    return head + bytes(-len(head) % _ALIGN), pieces
                text = f"it has {size} bytes, above the limit of {self._most_bytes}"
            answer = Answer("error", text)
        return _TICKET.pack(ticket, False) + pickle.dumps((answer.kind, answer.value)), []

    def _resolve(self, ticket: int, answer: Answer, num_bytes: int = 0) -> None:
        with self._lock:
            found = self._pending.pop(ticket, None)
        if found is not None:  # else its request was released, or the peer was lost
            found[-1].resolve(answer, num_bytes)

    def lost(self, peer: GlooPeer, text: str) -> None:
        """Answer everybody who waits for ``peer``: it will not."""
        with self._lock:
            peer.failure = peer.failure or text
            lost = [t for t, (owner, _, _) in self._pending.items() if owner == peer.stage]
        self._own.gone(peer.stage)
        for ticket in lost:
            self._resolve(ticket, Answer("error", text))
