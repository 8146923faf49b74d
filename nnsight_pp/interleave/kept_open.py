"""The visit of a worker that waits at a barrier, or has ended: what still lands, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_pp.core.ask import Join
from nnsight_pp.core.location import Visit
from nnsight_pp.errors import EarlyStopException
from nnsight_pp.interleave.worker import ClosedEarly

if TYPE_CHECKING:
    from nnsight_pp.interleave.asks import Asks
    from nnsight_pp.interleave.visit import OpenVisit
    from nnsight_pp.interleave.worker import Worker


def join(asks: Asks, worker: Worker, barrier: object, count: int) -> None:
    """Wait until ``count`` workers have come to ``barrier``; they go on in that order."""
    arrived = asks.waiting.setdefault(id(barrier), [])
    arrived.append(worker)
    if len(arrived) >= count:
        asks.released.extend(asks.waiting.pop(id(barrier)))
    asks.park(worker, Join(barrier))
    visit = worker.visit
    if visit is not None and visit.handed.is_over:  # the model has gone on since
        worker.visit = None
        if worker.timeline is not None:
            watch(worker, visit, str(barrier))


def give_up(asks: Asks, worker: Worker, barrier: object) -> None:
    """Let ``worker`` wait at ``barrier`` no more."""
    arrived = asks.waiting.get(id(barrier), [])
    if worker in arrived:
        arrived.remove(worker)
    if not arrived:
        asks.waiting.pop(id(barrier), None)


def stay(asks: Asks, worker: Worker) -> None:
    """Let the edits of the open visit land, and keep it: a barrier may open in time."""
    if worker.visit is not None:
        try:
            worker.visit.commit_and_stay()
        except Exception as error:
            asks.alone(worker, error)
            raise


def watch(worker: Worker, visit: OpenVisit, wait: str) -> None:
    """Note that the model went on while ``worker`` waited: later edits of ``visit`` are lost."""
    memo = worker.memo
    if memo is not None:
        if not visit.handed.is_over:
            visit.watch_edits()
        edited = Visit(memo.location, memo.step)
        worker.closed_early = ClosedEarly(visit, edited, wait, worker.where())


def commit_last(worker: Worker) -> None:
    """Let the edits of a worker land that has ended without asking for anything else."""
    visit, worker.visit = worker.visit, None
    if visit is None or visit.handed.is_over:
        return
    if worker.error is not None and not isinstance(worker.error, EarlyStopException):
        return
    try:
        visit.commit() if worker.timeline is None else visit.commit_read()
    except Exception as error:
        worker.error = error
