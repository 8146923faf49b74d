"""Blocks that share names, on an engine: every rank runs their lines in the order of one process.

Note [Blocks that share names]
    In one process the model hands its values to all blocks in the order in which it computes them,
    so what one block has bound when another looks is decided by the model. On stages each rank
    computes a part only, and a worker that ran ahead with lazy values would bind and change things
    too early for the others. So workers whose blocks share names do not run ahead: one that asks
    for another stage's value parks until the rank's *timeline* comes to that value, and is then
    given the lazy one. For stages before this one that is when the step is opened, for this one the
    forward itself, for stages behind at the next pipeline-safe point, when every stage has closed
    the step. The order of a stage's locations is known to all from a trial forward. So all ranks
    switch between these workers alike, and a lazy value can be brought where it is given.

    Their requests must go through the engine in the same steps. What the engine must do so that
    they do is `engines.vllm.together`.

Only the result of a call can be missing: it runs on the stage that holds the module, when that
stage's own timeline is there. It may be used once it is; before, it is refused (`remote`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from nnsight_pp.core.ask import BEHIND_ALL, Moment, Turn
from nnsight_pp.errors import ValueUnavailableError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.worker import Worker

_BEFORE_ALL = -1


@final
class Timeline:
    """The workers of blocks that share names, and how far they have come on this rank.

    Args:
        turns: Runs them.
    """

    __slots__ = ("_turns", "has_failed", "is_settled", "now", "workers")

    def __init__(self, turns: Interleaver) -> None:
        self._turns = turns
        # In the order of their blocks.
        self.workers: list[Worker] = []
        # Invariant: it only grows.
        self.now = Moment(_BEFORE_ALL, _BEFORE_ALL, _BEFORE_ALL)
        # Whether every step that was opened here is closed on all stages.
        self.is_settled = False
        self.has_failed = False

    def add(self, worker: Worker) -> None:
        """Take ``worker`` in, and run it to its first park."""
        worker.timeline = self
        self.workers.append(worker)
        self._turns.add(worker)

    def open_step(self, requests: Sequence[str], step: int) -> None:
        """Open ``step`` of ``requests``, which are in the order of their blocks."""
        self.is_settled = False
        self.now = Moment(step, _BEFORE_ALL, _BEFORE_ALL)
        for request in requests:
            self._turns.open_step(request, step)
        self._run_to(Moment(step, self._turns.stage, _BEFORE_ALL))

    def settle(self) -> None:
        """Run through what the stages behind this one have computed since.

        Call it at a pipeline-safe point only: every stage has closed the steps so far.
        """
        self.is_settled = True
        self._run_to(Moment(BEHIND_ALL, BEHIND_ALL, BEHIND_ALL))

    def end(self) -> None:
        """Settle for the last time: the requests of all are over."""
        self._turns.asks.finishing.update(worker.request for worker in self.workers)
        self.settle()
        self.now = Moment(BEHIND_ALL, BEHIND_ALL, BEHIND_ALL)

    def _run_to(self, end: Moment) -> None:
        while True:
            parked = [(worker, worker.ask) for worker in self.workers]
            turns = [(worker, ask) for worker, ask in parked if isinstance(ask, Turn)]
            moment = min((ask.moment for _, ask in turns), default=end)
            if moment >= end:
                return
            self.now = moment
            for worker, ask in turns:
                if ask.moment == moment and worker.ask is ask:
                    self._turns.resume(worker, None)

    def fail(self, culprit: Worker, error: BaseException) -> None:
        """Note that ``culprit`` has ended by ``error``, or goes its own way: so do the others."""
        if self.has_failed:
            return
        self.has_failed = True
        text = explain(
            f"A block that this one shares names with has failed: {type(error).__name__}: {error}",
            why="What the two share is not known to be alike on every stage any more.",
            todo="Look at the other block's error.",
        )
        for worker in self.workers:
            if worker is not culprit:
                worker.alone(ValueUnavailableError(text), is_echo=True)
