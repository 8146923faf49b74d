"""An ask where this process computes everything and counts visits: most rules say nothing there.

There is no gate, no other stage, no number that another rank must agree with. What is out of the
ordinary (a late ask, the result, a skip, several workers at one value) is left to `interleave.asks`
and `interleave.interleaver`, which would also do what is done here, in more steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from greenlet import getcurrent

from nnsight_pp.core.ask import Read
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.interleave.kept_open import commit_last
from nnsight_pp.interleave.visit import Handed, OpenVisit
from nnsight_pp.interleave.worker import Memo

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.location import Location
    from nnsight_pp.interleave.asks import Asks
    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.worker import Worker

# What `read` returns for an ask that it leaves to others.
NOT_READ = object()

_new_tuple = tuple.__new__  # a named tuple's own `__new__` takes three times as long


def read(asks: Asks, worker: Worker, location: Location) -> Any:
    """Return the value of ``location``, parking until it is there, or `NOT_READ`.

    Call it where no value of this location is open or kept.
    """
    counts = asks.counts
    if counts is None or location[1] in ("result", "skip"):
        return NOT_READ
    passed = counts.get(location, 0)
    visit = passed if worker.is_relaxed else worker.step
    greenlet = worker.greenlet
    if passed > visit or worker.is_calling or getcurrent() is not greenlet:
        return NOT_READ
    if worker.closed_early is not None or worker.timeline is not None:
        return NOT_READ
    open_visit, worker.visit = worker.visit, None
    if open_visit is not None:
        try:
            open_visit.commit()
        except Exception as error:
            asks.alone(worker, error)
            raise
    number = worker.asked
    worker.asked = number + 1
    worker.ask = Read(number, location, visit)
    asks.parked.add(location, worker)
    value = greenlet.parent.switch()
    worker.memo = _new_tuple(Memo, (location, worker.step, value, True))
    return value


def serving(turns: Interleaver) -> Callable[[Location, Any], Any]:
    """Return a function that does what ``turns.serve`` does, called by the greenlet of now."""
    counts = turns.asks.counts
    return turns.serve if counts is None else _serving(turns, counts)


def _serving(turns: Interleaver, counts: dict[Location, int]) -> Callable[[Location, Any], Any]:
    asks, observers, switch = turns.asks, turns.observers.at, turns.switch.switch
    waiting, driver = asks.parked.by_location, getcurrent()

    def serve(location: Location, value: Any) -> Any:
        workers = waiting.get(location)
        if workers is None or len(workers) > 1:
            return turns.serve(location, value)
        worker = workers[0]
        ask, cut = worker.ask, worker.cut
        number = counts.get(location, 0)
        if type(ask) is not Read or ask.visit != number or ask.seen is not None:
            return turns.serve(location, value)
        if cut is None or worker.randomness is not None or worker.timeline is not None:
            return turns.serve(location, value)
        handed = Handed(value)
        is_whole = type(cut) is WholeCut
        visit = OpenVisit(handed, cut, is_whole=is_whole)
        try:
            answer = value if is_whole else visit.give()
        except Exception:
            return turns.serve(location, value)  # where it is raised in the block
        if number and worker.loop_depth:
            worker.is_relaxed = True
        worker.visit = visit
        worker.ask = None
        del waiting[location]
        greenlet = worker.greenlet
        greenlet.parent = driver
        switch(worker.slot, greenlet, (answer,))
        if worker.has_ended:
            commit_last(worker)
            turns.ended(worker)
        while asks.released:
            turns.resume(asks.released.pop(0), None)
        if location in waiting:
            value = turns.serve_all(location, handed, tuple(waiting[location]))
        else:
            value = handed.leave()
        if observers and location in observers:
            for _, observe in observers[location]:
                observe(value)
        counts[location] = counts.get(location, 0) + 1
        return value

    return serve
