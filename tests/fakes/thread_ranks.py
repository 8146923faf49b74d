"""Ranks that split the layers of a small model, each a thread of this process.

A collective is a barrier with a bound: a rank that comes to it alone, or with a message of another
size, fails the test where a real one would hang or read garbage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from nnsight_pp.core.location import Location
from nnsight_pp.core.rows import Rows, TokenCut
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.worker import Worker, current_worker
from nnsight_pp.parallel.joined import Parts
from nnsight_pp.parallel.parts import ColumnGroup, Columns, Summand

BOUND_S = 5.0
# The locations of the model, in order, and what its ranks hold of each.
FUSED, WHOLE, SUMMED, UNKNOWN, LAST = (
    Location(f"model.{name}", "output") for name in ("fused", "whole", "summed", "unknown", "last")
)
RULES = {FUSED: (Columns((ColumnGroup(4), ColumnGroup(2))),), SUMMED: (Summand(),)}
TOKENS = 3


_BY_ASKS: WeakValueDictionary[int, SplitRank] = WeakValueDictionary()


class ThreadGroup:
    """One rank's end of the group; see the module's text."""

    device = "cpu"

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self.num_collectives = 0
        self._slots = slots
        self._barrier = barrier

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_collectives += 1
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait(BOUND_S)
        found = list(self._slots)
        self._barrier.wait(BOUND_S)
        shapes = {(one.shape, one.dtype) for one in found}
        assert len(shapes) == 1, f"ranks met in different collectives: {shapes}"
        return found

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor)).sum(0)


class SplitRank:
    """One rank: serves a step of the model to the workers of its requests."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group
        self.switch = thread_state.load()
        self.turns = Interleaver(StepClock(), self.switch, joiner=Parts(group, RULES))
        _BY_ASKS[id(self.turns.asks)] = self
        self.workers: dict[str, Worker] = {}
        self.begun: dict[str, int] = {}
        # A location at which rank 1 has another value than rank 0, and from which step on.
        self.odd: tuple[Location, int] | None = None
        self.seen: dict[Location, torch.Tensor] = {}

    def add(self, request: str, block: Callable[[], None], step: int = 0) -> None:
        self.begun[request] = step
        worker = Worker(request, block, __file__, self.switch.new_slot(False))
        self.workers[request] = worker
        self.turns.add(worker)
        self.turns.agree(request, is_new=True, has_failed=False)

    def step(self, number: int) -> None:
        for index, (request, worker) in enumerate(self.workers.items()):
            self.turns.catch_up(request)
            self.turns.open_step(request, number - self.begun[request])
            self.turns.agree(request, is_new=False, has_failed=False)
            worker.cut = TokenCut(Rows(index * TOKENS, TOKENS, len(self.workers) * TOKENS))
        for location in (FUSED, WHOLE, SUMMED, UNKNOWN, LAST):
            value = self._computed(location)
            if self.odd is not None and self.odd[0] == location and self.odd[1] <= number:
                value += self.group.rank
            self.seen[location] = self.turns.serve(location, value)
            self.group.gather(torch.zeros(1))  # one of the model's own
        for request in self.workers:
            self.turns.close_step(request, number - self.begun[request])

    def _computed(self, location: Location) -> torch.Tensor:
        rows = torch.arange(len(self.workers) * TOKENS, dtype=torch.float32)[:, None]
        if location == FUSED:
            # Columns 0 to 3 are one group, 4 and 5 the other: rank 0 holds 0, 1 and 4.
            columns = [0, 1, 4] if self.group.rank == 0 else [2, 3, 5]
            return 10 * rows + torch.tensor(columns)
        if location in (SUMMED, UNKNOWN):
            return (rows + torch.arange(6.0)) * (1 + self.group.rank)
        return rows + torch.arange(6.0)

    def finish(self) -> None:
        for request in list(self.workers):
            self.turns.finish(request)
            self.turns.drop(request)


def run_split(
    blocks: dict[str, Callable[[int, list[Any]], None]],
    num_steps: int = 1,
    *,
    begin: dict[str, int] | None = None,
    odd: tuple[Location, int] | None = None,
) -> tuple[list[SplitRank], list[dict[str, list[Any]]]]:
    """Run each request's block on two ranks; return the ranks, and what the blocks appended.

    Args:
        blocks: By request.
        num_steps: Of the model.
        begin: With which step a request begins, if not with the first.
        odd: See `SplitRank`.
    """
    slots: list[Any] = [None, None]
    barrier = threading.Barrier(2)
    ranks: list[SplitRank | None] = [None, None]
    found: list[dict[str, list[Any]]] = [{name: [] for name in blocks} for _ in range(2)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            side = SplitRank(ThreadGroup(rank, slots, barrier))
            ranks[rank] = side
            side.odd = odd
            for number in range(num_steps):
                for name, block in blocks.items():
                    if (begin or {}).get(name, 0) == number:
                        own = found[rank][name]
                        side.add(name, lambda block=block, own=own: block(rank, own), number)
                side.step(number)
            side.finish()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return [rank for rank in ranks if rank is not None], found


def read(location: Location) -> Any:
    worker = current_worker(location)
    assert worker.turns is not None
    return worker.turns.read(worker, location)


def write(location: Location, value: Any) -> None:
    worker = current_worker(location)
    assert worker.turns is not None
    worker.turns.write(worker, location, value)


def call(path: str, given: Any, run: Callable[[Any], Any]) -> Any:
    worker = current_worker(path)
    assert worker.turns is not None
    return worker.turns.call(worker, path, given, run)


def split_rank_of(worker: Worker) -> SplitRank:
    return _BY_ASKS[id(worker.turns)]
