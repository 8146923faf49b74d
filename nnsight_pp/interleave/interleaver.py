"""Who gets the turn: a rank's workers, and the values that the model hands over.

The driver (the model's thread) calls `serve` at every value, `open_step` and `close_step` around
a forward, `catch_up` at a pipeline-safe point, and `finish` when a request is over. A worker calls
`read`, `write` and `begin_step`. Everything else follows from the rules below.

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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from greenlet import getcurrent

from nnsight_pp.core.ask import AskKey, Pull, Read, Step, Write
from nnsight_pp.core.location import RESULT, Location, Visit
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import OutOfOrderError, OutsideTraceError, ParkRefusedError, explain
from nnsight_pp.interleave.clock import Clock
from nnsight_pp.interleave.parked import Parked
from nnsight_pp.interleave.remote import RemoteAsk
from nnsight_pp.interleave.unwind import loop_warning, out_of_order, unwind
from nnsight_pp.interleave.visit import OpenVisit
from nnsight_pp.interleave.worker import Memo, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.ask import Ask
    from nnsight_pp.core.protocols import Link, Owners, Switch


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
        snapshot: Copies a served value for publishing.
        where: Says in words where this rank is, for messages.
    """

    def __init__(
        self,
        clock: Clock,
        switch: Switch,
        *,
        stage: int = 0,
        owners: Owners | None = None,
        link: Link | None = None,
        make_lazy: Callable[[RemoteAsk], Any] | None = None,
        snapshot: Callable[[Any], Any] | None = None,
        where: str = "",
    ) -> None:
        self.clock = clock
        self.stage = stage
        self.where = where
        self._switch = switch
        self._owners = owners
        self._link = link
        self._make_lazy = make_lazy
        self._snapshot = snapshot
        self._parked = Parked()
        self._workers: dict[str, list[Worker]] = {}
        # Requests whose last step is over: their pulls may be waited for in place.
        self._finishing: set[str] = set()
        # The first worker that ended by an exception.
        self.failed: Worker | None = None

    # -- the driver's side ---------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Take ``worker`` in, and run it to its first park."""
        worker.turns = self
        self._workers.setdefault(worker.request, []).append(worker)
        self._resume(worker, None)

    def serve(self, location: Location, value: Any) -> Any:
        """Hand ``value`` to the workers parked at ``location``; return what the model goes on with.

        Cost: one dictionary look-up where nobody is parked.
        """
        workers = self._parked.at(location)
        if workers is not None:
            for worker in tuple(workers):
                ask = worker.ask
                if (
                    isinstance(ask, (Read, Write))
                    and worker.cut is not None
                    and ask.location == location
                    and ask.visit == self.clock.now(worker, location)
                ):
                    value = self._hand(worker, ask, value)
        self.clock.passed(location)
        return value

    def is_wanted(self, location: Location) -> bool:
        """Whether a worker is parked at ``location``."""
        return self._parked.at(location) is not None

    def open_step(self, request: str, step: int) -> None:
        """Open ``step`` of ``request``: workers that wait at its gate run to their next park."""
        self.clock.open(request, step)  # type: ignore[union-attr]
        for worker in self._workers.get(request, ()):
            if isinstance(worker.ask, Step) and worker.ask.step <= step:
                self._resume(worker, None)

    def close_step(self, request: str, step: int) -> None:
        """Close ``step`` of ``request``: what was not served in it never will be."""
        self.clock.close(request, step)  # type: ignore[union-attr]
        for worker in self._workers.get(request, ()):
            while isinstance(worker.ask, (Read, Write)) and worker.ask.visit <= step:
                if worker.ask.location == RESULT:
                    break
                self._throw(worker, self._too_late(worker, worker.ask.location, worker.ask.visit))
        if self._link is not None:
            self._link.close(request, step)

    def catch_up(self, request: str) -> None:
        """Bring the values of later stages that workers of ``request`` are parked on.

        Call it at a pipeline-safe point only: every stage has closed the steps so far.
        """
        for worker in self._workers.get(request, ()):
            while isinstance(worker.ask, Pull):
                try:
                    value = worker.ask.pending.wait()
                except Exception as error:  # noqa: BLE001 - raised again at the user's line
                    self._throw(worker, error)
                else:
                    self._resume(worker, value)

    def finish(self, request: str, result: Any = None) -> list[Worker]:
        """End ``request``: serve its result, unwind what is still parked, return its workers."""
        self._finishing.add(request)
        self.catch_up(request)
        workers = self._workers.get(request, [])
        for worker in workers:
            while isinstance(worker.ask, (Read, Write)) and worker.ask.location == RESULT:
                worker.ask.visit = self.clock.now(worker, RESULT)
                self._hand(worker, worker.ask, result)
        for worker in workers:
            if not worker.has_ended:
                unwind(worker, self._throw, self.where)
        return workers

    def drop(self, request: str) -> None:
        """Forget ``request`` and tell the other stages that nothing more is needed of it."""
        for worker in self._workers.pop(request, ()):
            if not worker.has_ended:
                unwind(worker, self._throw, self.where)
        self._finishing.discard(request)
        self.clock.drop(request)
        if self._link is not None:
            self._link.release(request)

    def requests(self) -> list[str]:
        """Return the requests that have a worker here."""
        return list(self._workers)

    def workers(self) -> list[Worker]:
        """Return every worker of this rank."""
        return [worker for workers in self._workers.values() for worker in workers]

    def statistics(self) -> dict[str, int]:
        """Return how many requests, live workers and parked asks there are."""
        return {
            "requests": len(self._workers),
            "workers": sum(not worker.has_ended for worker in self.workers()),
            "parked": len(self._parked),
        }

    def _hand(self, worker: Worker, ask: Read | Write, value: Any) -> Any:
        """Open a visit for ``worker``, let it run, and return the value with its edits."""
        assert worker.cut is not None
        visit = OpenVisit(value, worker.cut)
        if worker.loop_depth and ask.visit > 0:
            worker.is_relaxed = True
        try:
            if isinstance(ask, Read):
                served = visit.give()
                self._publish(worker, ask, served)
                answer = served
            else:
                visit.assign(ask.value)
                answer = None
        except Exception as error:  # noqa: BLE001 - raised again at the user's line
            self._throw(worker, error)
            return value
        worker.visit = visit
        self._resume(worker, answer)
        if worker.visit is visit:  # it ended without asking for anything else
            worker.visit = None
            if worker.error is None:
                try:
                    visit.commit()
                except Exception as error:  # noqa: BLE001 - the request's own error
                    worker.error = error
                    self._ended(worker)
        return visit.live

    def _publish(self, worker: Worker, ask: Read, served: Any) -> None:
        if self._link is not None and ask.location != RESULT:
            copy = served if self._snapshot is None else self._snapshot(served)
            self._link.publish(AskKey(worker.request, ask.number), ask.location, copy)

    def _unpark(self, worker: Worker) -> None:
        if isinstance(worker.ask, (Read, Write)):
            self._parked.remove(worker.ask.location, worker)
        worker.ask = None

    def _resume(self, worker: Worker, value: Any) -> None:
        self._unpark(worker)
        self._switch.switch(worker.slot, worker.greenlet, (value,))
        if worker.has_ended:
            self._ended(worker)

    def _throw(self, worker: Worker, error: BaseException) -> None:
        self._unpark(worker)
        self._switch.throw(worker.slot, worker.greenlet, error)
        if worker.has_ended:
            self._ended(worker)

    def _ended(self, worker: Worker) -> None:
        if worker.error is None:
            return
        self.failed = self.failed or worker
        if self._link is not None:
            name = type(worker.error).__name__
            self._link.fail(worker.request, f"{name}: {worker.error}")

    # -- the worker's side ---------------------------------------------------------------------

    def read(self, worker: Worker, location: Location) -> Any:
        """Return the value of ``location`` at the worker's step, parking until it is there."""
        memo = worker.memo
        if memo is not None and memo.location == location and memo.step == worker.step:
            return memo.value
        owner, visit = self._ask(worker, location)
        number = worker.next_number()
        if owner is None or owner == self.stage:
            value = self._park(worker, Read(number, location, visit))
        else:
            assert self._make_lazy is not None
            value = self._make_lazy(RemoteAsk(self, worker, number, owner, location, visit))
        worker.memo = Memo(location, worker.step, value)
        return value

    def write(self, worker: Worker, location: Location, value: Any) -> None:
        """Let the model, and later reads of this step, see ``value`` at ``location``."""
        memo = worker.memo
        if memo is not None and memo.location == location and memo.step == worker.step:
            if worker.visit is not None:
                value = self._here(value)
                worker.visit.assign(value)
        else:
            owner, visit = self._ask(worker, location)
            number = worker.next_number()
            if owner is None or owner == self.stage:
                value = self._here(value)
                self._park(worker, Write(number, location, visit, value))
        worker.memo = Memo(location, worker.step, value)

    def begin_step(self, worker: Worker, step: int) -> None:
        """Pin what ``worker`` asks for from now on to ``step``; wait at its gate on an engine."""
        self._leave(worker)
        worker.memo = None
        worker.is_relaxed = False
        if step != worker.step:
            worker.stage_mark = -1
        worker.step = step
        self._enter_step(worker)

    def restore_step(self, worker: Worker, step: int) -> None:
        """Pin ``worker`` to ``step`` again when a loop is over, without waiting for it."""
        self._leave(worker)
        worker.memo = None
        worker.is_relaxed = False
        worker.step = step

    def pull(self, worker: Worker, ask: RemoteAsk, picks: Sequence[Any], in_torch: bool) -> Any:
        """Return another stage's answer, with ``picks`` applied there.

        Args:
            worker: The worker that forces the value.
            ask: What was asked.
            picks: Index steps that the owner applies before it sends.
            in_torch: Whether torch's own frames stand between the caller and the block.
        """
        if worker.has_ended or not worker.is_current:
            raise OutsideTraceError(
                explain(
                    f"The remote value {ask.visit} was used outside of its trace.",
                    why="A value of another stage can be brought only while its block runs.",
                    todo="Save it with `.save()`, and use it after the trace.",
                )
            )
        assert self._link is not None
        key = AskKey(worker.request, ask.number)
        pending = self._link.pull(key, ask.owner, ask.location, ask.step, picks)
        opened = self.clock.opened(worker.request)
        over = worker.request in self._finishing or (opened is not None and ask.step < opened)
        if ask.owner < self.stage or over:
            return pending.wait()
        if in_torch and not self._switch.may_park_in_torch:
            raise ParkRefusedError(
                explain(
                    f"{ask.visit} belongs to a later stage and was used inside a torch call.",
                    where=worker.where(),
                    why="The worker would have to park inside torch, and the exchange of torch's "
                    "thread-local state is off (NNSIGHT_PP_TLS_SWAP=0).",
                    todo="Unset NNSIGHT_PP_TLS_SWAP, or use the value one step later.",
                    ran=self.where,
                )
            )
        return self._park(worker, Pull(ask.location, ask.step, pending))

    def _ask(self, worker: Worker, location: Location) -> tuple[int | None, int]:
        """Leave the open visit, pass the step gate, check the order; return owner and visit."""
        self._leave(worker)
        owner = None
        if location != RESULT:
            if self._owners is not None:
                owner = self._owners.owner_of(location)
            self._enter_step(worker)
        visit = self.clock.target(worker, location)
        opened = self.clock.opened(worker.request)
        if location != RESULT and opened is not None:
            is_here = owner is None or owner == self.stage
            last = self.clock.closed(worker.request) if is_here else opened - 1
            if worker.step <= last or worker.request in self._finishing:
                raise self._too_late(worker, location, visit)
        if owner is not None:
            if owner < worker.stage_mark:
                raise self._backwards(worker, location, visit, owner)
            worker.stage_mark = owner
        return owner, visit

    def _leave(self, worker: Worker) -> None:
        """Close the worker's open visit: its edits so far land, later ones do not."""
        visit, worker.visit = worker.visit, None
        if visit is not None:
            visit.commit()

    def _enter_step(self, worker: Worker) -> None:
        opened = self.clock.opened(worker.request)
        if opened is not None and worker.step > opened and worker.request not in self._finishing:
            self._park(worker, Step(worker.step))
        elif opened is not None and worker.step > opened:
            raise loop_warning(worker, f"step {worker.step}")

    def _park(self, worker: Worker, ask: Ask) -> Any:
        if getcurrent() is not worker._greenlet:
            raise OutsideTraceError(f"{ask} was made by something that is not its worker")
        self._leave(worker)
        worker.ask = ask
        if isinstance(ask, (Read, Write)):
            self._parked.add(ask.location, worker)
        return worker.hand_over()

    def _here(self, value: Any) -> Any:
        """Return ``value`` with every remote leaf brought to this rank."""
        return map_leaves(
            value,
            lambda leaf: leaf._real_value() if issubclass(type(leaf), RemoteValue) else leaf,
        )

    def _too_late(self, worker: Worker, location: Location, visit: int) -> OutOfOrderError:
        return out_of_order(worker, Visit(location, visit), self.where)

    def _backwards(
        self, worker: Worker, location: Location, visit: int, owner: int
    ) -> OutOfOrderError:
        mark = worker.stage_mark
        why = (
            f"It belongs to stage {owner}, and the block has already asked stage {mark} in this "
            "step. A block must ask for values in the order in which the model computes them."
        )
        return out_of_order(worker, Visit(location, visit), self.where, why)

