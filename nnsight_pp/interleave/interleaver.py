"""Who gets the turn: a rank's workers, and the values that the model hands over.

The driver (the model's thread) calls `serve` at every value, `open_step` and `close_step` around
a forward, `catch_up` at a pipeline-safe point, and `finish` when a request is over. What a worker
calls is `interleave.asks`. Everything else follows from the rules below.

Note [Asks are numbered]
    Every rank runs the same block, so every rank's worker makes the same asks in the same order.
    `AskKey(request, number)` names an ask on every rank. The stage that owns the location parks
    the worker and publishes the answer as it was served; on any other stage the worker gets a lazy
    value at once and runs on.

Note [Order across stages]
    In one step, reads and writes go forward through the stages. An ask for an earlier stage's
    location after one for a later stage's is refused at the ask, on every rank alike.

Note [A rank waits only for answers that exist]
    At the end of a rank's forward of a step, before its activations go on, it closes the step: a
    worker still parked on one of its locations gets `OutOfOrderError`, and a pull of it is answered
    "closed". So in its forward a rank may wait in place for an earlier stage's value (that stage
    has closed the step), and for any value of an earlier step (all stages have). A later stage's
    value of this step parks the worker until the next pipeline-safe point.

Note [Calls may be deferred]
    A call runs in the owner's worker, which may itself be parked on a later stage's value. Once the
    step is closed there, a pull of a call that has not run is answered "deferred": the puller's
    worker stays parked and asks again at its next safe point. Until the owner opens the next step
    its worker does not move, so the answer does not depend on timing. When the request is over the
    pull waits: the owner runs the block to its end, and asks come in the same order everywhere, so
    who waits for ask n waits for somebody who needs only asks below n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from greenlet import getcurrent

from nnsight_pp.core.ask import Join, Read, Step, Write
from nnsight_pp.core.lens import through
from nnsight_pp.core.location import RESULT, Location
from nnsight_pp.core.rows import WHOLE
from nnsight_pp.core.tree import copied
from nnsight_pp.errors import EarlyStopException
from nnsight_pp.interleave.agreement import together
from nnsight_pp.interleave.asks import Asks
from nnsight_pp.interleave.clock import Clock, StepClock, VisitClock
from nnsight_pp.interleave.kept_open import commit_last, give_up
from nnsight_pp.interleave.observers import Observers
from nnsight_pp.interleave.remote import bring
from nnsight_pp.interleave.skips import Skips
from nnsight_pp.interleave.unwind import unwind
from nnsight_pp.interleave.visit import Handed, OpenVisit

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.ask import Ask
    from nnsight_pp.core.protocols import JoinedValue, Joiner, Link, Owners, Switch
    from nnsight_pp.interleave.agreement import Turns
    from nnsight_pp.interleave.remote import RemoteAsk
    from nnsight_pp.interleave.worker import Worker

    _Joined = JoinedValue | None
    _Access = Read | Write


@final
class Interleaver:
    """The workers of one rank and the turns between them and the model.

    Args:
        clock: Which visit an ask means (`StepClock` on an engine).
        switch: The exchange of thread-local state.
        stage: This rank's pipeline stage.
        owners: Which stage computes a location. None: this process computes everything.
        link: How answers cross stages. None with one stage.
        make_lazy: Builds what stands for another stage's value.
        snapshot: Copies a served value for publishing. Default: clones its tensors.
        joiner: Makes values whole over the ranks that split each layer. None: there is one.
        where: Says in words where this rank is, for messages.
        arrange: Orders the workers that one value is handed to. Default: as they arrived.
    """

    def __init__(  # noqa: PLR0913 - the one visible place where an engine wires a rank
        self,
        clock: Clock,
        switch: Switch,
        *,
        stage: int = 0,
        owners: Owners | None = None,
        link: Link | None = None,
        make_lazy: Callable[[RemoteAsk], Any] | None = None,
        snapshot: Callable[[Any], Any] | None = None,
        joiner: Joiner | None = None,
        where: str = "",
        arrange: Callable[[tuple[Worker, ...]], tuple[Worker, ...]] | None = None,
    ) -> None:
        self.clock = clock
        self._arrange = arrange or tuple
        self.stage, self.where = stage, where
        self.asks = Asks(
            clock,
            switch,
            stage=stage,
            owners=owners,
            link=link,
            make_lazy=make_lazy,
            snapshot=copied if snapshot is None else snapshot,
            where=where,
            joiner=joiner,
        )
        self.switch, self._joiner, self._link = switch, joiner, link
        self._parked = self.asks.parked
        # Only one of the two clocks counts visits; the other is spared the call.
        self._passed = clock.passed if isinstance(clock, VisitClock) else None
        self._workers: dict[str, list[Worker]] = {}
        self.observers = Observers()
        self._observed = self.observers.at
        self.skips = Skips(self._parked, clock)
        # The first worker that ended by an exception, until its request is dropped.
        self.failed: Worker | None = None
        self.hooking: Any = None  # the greenlet of a worker whose call of a module is served too

    # -- the driver's side ---------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Take ``worker`` in, and run it to its first park."""
        worker.turns, worker.near = self.asks, self.asks.near
        self._workers.setdefault(worker.request, []).append(worker)
        self.resume(worker, None)

    def serve(self, location: Location, value: Any) -> Any:
        """Hand ``value`` to the workers parked at ``location``; return what the model goes on with.

        Cost: one dictionary look-up where nobody is parked.
        """
        workers = self._parked.at(location)
        if workers is not None:
            value = self.serve_all(location, Handed(value), tuple(workers))
        if self._observed:
            self.observers.show(location, value, self._joiner)
        if self._passed is not None:
            self._passed(location)
        return value

    def serve_all(self, location: Location, handed: Handed, workers: tuple[Worker, ...]) -> Any:
        """Serve ``workers``, then those that come here now: again with a lens, or by a barrier."""
        served: dict[int, Ask | None] = {}
        joined: _Joined = None
        while workers:
            workers = self._arrange(workers)
            turns = None if len(workers) == 1 else self.asks.agreement.begin(workers)
            for worker in workers:
                ask = worker.ask
                served[id(ask)] = ask
                if (
                    isinstance(ask, (Read, Write))
                    and worker.cut is not None
                    and ask.place == location
                    and ask.visit == self.clock.now(worker, location)
                    and not (self.skips.held and self.skips.is_inside(worker, location))
                ):
                    if self._joiner is not None and joined is None:
                        joined = self._joiner.join(location, handed.value, may_wait=True)
                        handed.value = joined.value
                    self._hand(worker, ask, handed, joined, turns)
            if turns is not None:
                for worker, written in self.asks.agreement.end(turns, joined, handed.value):
                    self._agree(worker, written, joined)
            left = self._parked.at(location)
            workers = () if left is None else tuple(x for x in left if id(x.ask) not in served)
        value = handed.leave()  # blocks that share names may have edited it since they had it
        for worker, _ in () if joined is None else handed.visits:
            self._agree(worker, (worker.cut or WHOLE).give(value), joined)
        return value if joined is None else joined.split(value)

    def open_step(self, request: str, step: int) -> None:
        """Open ``step`` of ``request``: workers that wait at its gate run to their next park."""
        assert isinstance(self.clock, StepClock)
        self.clock.open(request, step)
        for worker in self._workers.get(request, ()):
            if isinstance(worker.ask, Step) and worker.ask.step <= step:
                self.resume(worker, None)

    def agree(self, request: str, *, is_new: bool, has_failed: bool) -> None:
        """Compare ``request`` after turns that no value of the model has brought."""
        for worker in self._workers.get(request, ()):
            self._agree(worker, has_failed=has_failed)
        if is_new and request not in self._workers:
            self.asks.agreement.without_worker(request)

    def close_step(self, request: str, step: int) -> None:
        """Close ``step`` of ``request``: what was not served in it never will be."""
        assert isinstance(self.clock, StepClock)
        self.clock.close(request, step)
        for worker in self._workers.get(request, ()):
            while isinstance(worker.ask, (Read, Write)) and worker.ask.visit <= step:
                if worker.ask.location == RESULT:
                    break
                error = self.asks.too_late(worker, worker.ask.location, worker.ask.visit)
                self._throw(worker, self.asks.alone(worker, error, at=worker.ask.number))
                self._agree(worker)
        if self._link is not None:
            self.asks.let_go.close(self._link, request, step)

    def catch_up(self, request: str) -> None:
        """Bring later stages' values that workers are parked on; at pipeline-safe points only."""
        for worker in self._workers.get(request, ()):
            bring(worker, self.resume, self._throw, is_last=request in self.asks.finishing)

    def finish(self, request: str, result: Any = None) -> list[Worker]:
        """End ``request``: serve its result, unwind what is still parked, return its workers."""
        self.asks.finishing.add(request)
        self.catch_up(request)
        workers = self._workers.get(request, [])
        for worker in workers:
            while isinstance(worker.ask, (Read, Write)) and worker.ask.location == RESULT:
                worker.ask.visit = self.clock.now(worker, RESULT)
                self._hand(worker, worker.ask, Handed(result), None)
        for worker in workers:
            self._unwind(worker)
            self._agree(worker)
        return workers

    def drop(self, request: str) -> None:
        """Forget ``request`` and tell the other stages that nothing more is needed of it."""
        for worker in self._workers.pop(request, ()):
            self._unwind(worker)
        if self.failed is not None and self.failed.request == request:
            self.failed = None
        self.observers.drop(request)
        self.asks.finishing.discard(request)
        self.clock.drop(request)
        if self._link is not None:
            self._link.release(request)

    def workers(self, request: str | None = None) -> list[Worker]:
        """Return every worker of this rank, or those of ``request``, on any thread."""
        if request is not None:
            return list(self._workers.get(request, ()))
        return [worker for workers in self._workers.values() for worker in workers]

    def statistics(self) -> dict[str, int]:
        """Return how many requests, live workers and parked asks there are."""
        return {
            "requests": len(self._workers),
            "workers": sum(not worker.has_ended for worker in self.workers()),
            "parked": len(self._parked),
        }

    def _hand(
        self, worker: Worker, ask: _Access, handed: Handed, joined: _Joined, turns: Turns = None
    ) -> None:
        """Open a visit of ``handed`` for ``worker``, and let it run; ``turns`` takes it in."""
        cut = worker.cut or WHOLE
        if joined is not None:
            cut = joined.cut_of(cut, worker.where)
        visit = OpenVisit(handed, through(ask.seen, cut), writes_raw=worker.may_write_raw(ask.seen))
        if worker.timeline is not None and ask.location != RESULT:
            handed.visits.append((worker, visit))
            worker.timeline.now = self.asks.order.moment_of(
                worker, ask.place, ask.visit, self.stage
            )
        if worker.loop_depth and ask.visit > 0:
            worker.is_relaxed = True
        try:
            answer = visit.give() if isinstance(ask, Read) else visit.assign(ask.value)
            if isinstance(ask, Read):
                self.asks.publish(worker, ask.number, ask.location, answer)
        except Exception as error:
            self._throw(worker, self.asks.alone(worker, error, at=ask.number))
            if turns is not None:
                turns.append((worker, None))
            else:
                self._agree(worker, None, joined)
            return
        worker.visit = visit
        self.resume(worker, answer)
        if turns is not None:
            turns.append((worker, cut))
        elif joined is not None:
            self._agree(worker, joined.written(cut, handed.value), joined)

    def _agree(self, worker: Worker, *left: Any, has_failed: bool = False) -> None:
        """See Note [Ranks agree after every turn] in `interleave.agreement`."""
        error = self.asks.agreement.after_turn(worker, *left, has_failed=has_failed)
        for one in together(worker) if error is not None else ():
            self._unwind(one, error)
            self.observers.drop(one.request)  # another rank may have none: it joins no value

    def _unwind(self, worker: Worker, error: Exception | None = None) -> None:
        unwind(worker, self._throw, self.where, self.clock, error)
        if not worker.has_ended:  # it caught all that it was thrown: leave it where it is
            _unpark(self, worker)
            worker.abandon()
            self.ended(worker)

    def resume(self, worker: Worker, value: Any) -> None:
        """Give ``worker`` the turn with the answer to its ask; then whom it let through."""
        self._turn(worker, self.switch.switch, (value,))
        while self.asks.released:
            self.resume(self.asks.released.pop(0), None)

    def _throw(self, worker: Worker, error: BaseException) -> None:
        self._turn(worker, self.switch.throw, error)

    def _turn(self, worker: Worker, step: Callable[[Any, Any, Any], Any], argument: Any) -> None:
        if worker.ask is not None:
            _unpark(self, worker)
        worker.greenlet.parent = getcurrent()
        if worker.randomness is None:
            step(worker.slot, worker.greenlet, argument)
        else:
            with worker.randomness:
                step(worker.slot, worker.greenlet, argument)
        if worker.has_ended:
            commit_last(worker)
            self.ended(worker)

    def ended(self, worker: Worker) -> None:
        """Take note of the end of ``worker``."""
        worker.leave_greenlet()
        if worker.error is None and worker.closed_early is not None:
            worker.error = self.asks.order.late_edit(worker)
        if worker.error is None:
            return
        self.failed = self.failed or worker
        if self._link is not None:
            _fail(self._link, worker.request, worker.error)
        if worker.timeline is not None:
            worker.timeline.fail(worker, worker.error)


def _unpark(turns: Interleaver, worker: Worker) -> None:
    if isinstance(worker.ask, (Read, Write)):
        turns._parked.remove(worker.ask.place, worker)
        turns.skips.leave(worker)
    elif isinstance(worker.ask, Join):
        give_up(turns.asks, worker, worker.ask.barrier)
    worker.ask = None


def _fail(link: Link, request: str, error: BaseException) -> None:
    is_stop = isinstance(error, EarlyStopException)
    link.fail(request, f"{type(error).__name__}: {error}", is_stop=is_stop)


def renew(turns: Interleaver) -> bool:
    """Forget every visit and every block of ``turns``; return whether another run may have them.

    Call it when all requests have ended. It may where nobody is left waiting for anything.
    """
    asks, counts = turns.asks, turns.clock.counts
    turns._workers.clear()
    asks.finishing.clear()
    turns.observers.at.clear()
    turns.failed = turns.hooking = asks.surface = None
    if counts is None:
        return False
    counts.clear()
    return not (asks.parked.by_location or asks.waiting or asks.released or turns.skips.held)
