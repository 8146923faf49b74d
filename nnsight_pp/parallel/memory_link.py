"""A link between stages of one process: what tests use in place of a network.

It keeps the threads of the real one (an answer arrives on another thread, after a delay) and its
isolation (values cross as bytes).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.tree import leaves
from nnsight_pp.parallel.pending import PendingAnswer
from nnsight_pp.parallel.publications import Answer, Publications, Question
from nnsight_pp.parallel.waits import report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.ask import AskKey
    from nnsight_pp.core.location import Location
    from nnsight_pp.core.standing import Standing

log = logging.getLogger(__name__)


@final
class MemoryFabric:
    """The wires between the stages of one process.

    Args:
        num_stages: How many stages there are.
        pick: Applies index steps to a value.
        copy: Copies a value as a trip over a network would.
        delay_s: Called for each message; returns how long it takes.
        constant_of: Returns the weight of a printed location. Default: there is none.
        standing_of: Returns how far a stage is with a request. Default: nobody knows.
    """

    def __init__(
        self,
        num_stages: int,
        pick: Callable[[Any, Sequence[Any]], Any],
        copy: Callable[[Any], Any],
        delay_s: Callable[[], float] = lambda: 0.0,
        constant_of: Callable[[str], Any] | None = None,
        standing_of: Callable[[int, str], Standing] | None = None,
    ) -> None:
        stages = range(num_stages)
        self.publications = [
            Publications(
                [peer for peer in stages if peer != stage],
                pick,
                constant_of,
                None if standing_of is None else partial(standing_of, stage),
            )
            for stage in stages
        ]
        self.copy = copy
        self._delay_s = delay_s
        self._queues: list[queue.Queue[Callable[[], None] | None]] = [queue.Queue() for _ in stages]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), daemon=True) for lane in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def post(self, stage: int, action: Callable[[], None]) -> None:
        """Run ``action`` on the wire that leads to ``stage``, after a delay."""
        self._queues[stage].put(action)

    def _run(self, lane: queue.Queue[Callable[[], None] | None]) -> None:
        while (action := lane.get()) is not None:
            delay = self._delay_s()
            if delay > 0:
                time.sleep(delay)
            try:
                action()
            except Exception:
                log.exception("a message was dropped")

    def close(self) -> None:
        """Stop the wires."""
        for lane in self._queues:
            lane.put(None)
        for thread in self._threads:
            thread.join(10)


@final
class MemoryLink:
    """One stage's end of a `MemoryFabric`."""

    sums_alike = casts_copy = True

    def __init__(self, fabric: MemoryFabric, stage: int, bound_s: float = 30.0) -> None:
        self._fabric = fabric
        self._stage = stage
        self._bound_s = bound_s
        self._own = fabric.publications[stage]
        self.num_pulls = 0
        self.num_pending = 0
        self._lock = threading.Lock()

    def publish(self, key: AskKey, location: Location, value: Any) -> None:
        """See `core.protocols.Link`."""
        self._own.publish(key, location, value)

    def close(self, request: str, step: int) -> None:
        """See `core.protocols.Link`."""
        self._own.close(request, step)

    def fail(self, request: str, text: str, *, is_stop: bool = False) -> None:
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
        *,
        at_once: bool = False,
    ) -> PendingAnswer:
        """See `core.protocols.Link`."""
        with self._lock:
            self.num_pulls += 1
            self.num_pending += 1
        ran = f"stage {self._stage}"
        pending = PendingAnswer(
            location, step, owner, self._bound_s, ran,
            lambda visit: self._late(key.request, f"waits for {visit} of stage {owner}"),
        )  # fmt: skip
        question = Question(key, str(location), step, tuple(picks), kind)

        def resolve(answer: Answer) -> None:
            with self._lock:
                self.num_pending -= 1
            pending.resolve(answer, _num_bytes(answer.value))

        def reply(answer: Answer) -> None:
            try:
                answer = Answer(answer.kind, self._fabric.copy(answer.value))
            except Exception as error:
                answer = Answer("error", f"it cannot be sent ({type(error).__name__}: {error})")
            self._fabric.post(self._stage, lambda: resolve(answer))

        table = self._fabric.publications[owner]
        self._fabric.post(owner, lambda: table.ask(question, reply))
        return pending

    def _late(self, request: str, wait: str) -> str:
        peers = [one for one in range(len(self._fabric.publications)) if one != self._stage]
        return report(self.pull, request, (self._stage, self._own.standing(request)), peers, wait)

    def let_go(self, request: str, owner: int, asks: Sequence[tuple[int, int | None]]) -> None:
        """See `core.protocols.Link`."""
        table = self._fabric.publications[owner]
        self._fabric.post(owner, lambda: table.let_go(self._stage, request, asks))

    def release(self, request: str) -> None:
        """See `core.protocols.Link`."""
        self._own.end(request)
        for peer, table in enumerate(self._fabric.publications):
            if peer != self._stage:
                self._fabric.post(peer, lambda table=table: table.released(request, self._stage))

    def statistics(self) -> dict[str, int]:
        """Return pending pulls and published answers."""
        return {"pending": self.num_pending, **self._own.statistics()}


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(value) if isinstance(leaf, torch.Tensor))
