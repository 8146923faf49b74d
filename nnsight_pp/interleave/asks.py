"""The worker's side of an interleaver: what a block asks for, and when it is refused.

The methods here run inside a worker. They number its asks, hold it at the step gate, keep the order
across stages, and park it where only the model or another stage can answer. The notes in
`interleave.interleaver` state the rules.

Note [Errors that one stage sees alone]
    A local ask that is never served, a write that does not fit, or an answer that another stage
    cannot send is raised on one stage only. If the block catches it, that stage goes another way
    than the others, so the worker remembers the first such error and ends with it even when it was
    caught. From then on the numbers of its asks mean nothing to the others: it neither publishes
    nor pulls, as stages with different numbers could wait for each other. An error that every stage
    raises at the same line (order, unknown names) may be caught.

Note [A wait for a call closes the visit]
    A call of a module on another stage does not end the visit that is open, but a wait for its
    result may have to park, and then the model goes on. Edits of the visited value made after that
    would be lost on this number of stages and land on another: they are found by the value's
    version when the visit would have ended, and refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, final

from greenlet import getcurrent

from nnsight_pp.core.ask import AskKey, Join, Pull, Read, Step, Turn, Write
from nnsight_pp.core.location import RESULT, Location, Visit
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import (
    NotSupportedError,
    OutsideTraceError,
    explain,
)
from nnsight_pp.interleave import nearby
from nnsight_pp.interleave.agreement import Agreement
from nnsight_pp.interleave.kept_open import stay, watch
from nnsight_pp.interleave.let_go import LetGo
from nnsight_pp.interleave.order import Order
from nnsight_pp.interleave.parked import Parked
from nnsight_pp.interleave.remote import RemoteAsk
from nnsight_pp.interleave.unwind import loop_warning, park_refused
from nnsight_pp.interleave.worker import Memo, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.ask import Ask
    from nnsight_pp.core.lens import Seen
    from nnsight_pp.core.protocols import Joiner, Link, Owners, Surface, Switch
    from nnsight_pp.interleave.clock import Clock

# Where a value is served that stands inside another one (`core.lens`); None for any other.
_Seen: TypeAlias = "Seen | None"


@final
class Asks:
    """What the workers of one rank may do. The arguments are those of `Interleaver`."""

    def __init__(  # noqa: PLR0913 - made by `Interleaver` alone
        self,
        clock: Clock,
        switch: Switch,
        *,
        stage: int,
        owners: Owners | None,
        link: Link | None,
        make_lazy: Callable[[RemoteAsk], Any] | None,
        snapshot: Callable[[Any], Any],
        where: str,
        joiner: Joiner | None = None,
    ) -> None:
        self.clock = clock
        self.stage = stage
        self.where = where
        self.link = link
        self.parked, self.let_go, self.agreement = Parked(), LetGo(), Agreement(joiner, where)
        self.order = Order(clock, stage=stage, owners=owners, where=where)
        self.finishing = self.order.finishing
        self.alone = self.order.alone
        self.too_late = self.order.too_late
        # What only a model of this process offers to its blocks; None on an engine.
        self.surface: Surface | None = None
        # Who waits at a barrier, and who has been let through and waits for a turn.
        self.waiting: dict[int, list[Worker]] = {}
        self.released: list[Worker] = []
        # Whether a worker may park inside a torch call.
        self.may_park_in_torch = switch.may_park_in_torch
        # Only where one process computes everything, counts visits, and parks anywhere.
        is_near = owners is None and link is None and switch.may_park_in_torch
        self.near = nearby.state(clock.counts, self.parked) if is_near else None
        self._owners = owners
        self._make_lazy = make_lazy
        self._snapshot = snapshot

    def read(self, worker: Worker, location: Location, seen: _Seen = None) -> Any:
        """Return the value of ``location`` at the worker's step, parking until it is there."""
        memo = worker.memo
        if memo is not None and memo.location == location and memo.step == worker.step:
            if worker.visit is not None and worker.visit.has_views:
                value = self._settled(worker)
                worker.memo = Memo(location, worker.step, value, memo.is_here)
                return value
            return memo.value
        value = nearby.read(worker, location) if seen is None else NotImplemented
        if value is not NotImplemented:
            return value
        owner, visit = self._ask(worker, location, seen)
        number = worker.next_number(location, visit)
        if owner is None or owner == self.stage:
            value = _met(self, worker, Read(number, location, visit, seen))
        else:
            assert self._make_lazy is not None
            if worker.timeline is not None:
                self._wait_for_turn(worker, Read(number, location, visit, seen), owner)
            value = self._make_lazy(RemoteAsk(self, worker, number, owner, location, visit))
        worker.memo = Memo(location, worker.step, value, owner is None or owner == self.stage)
        return value

    def write(self, worker: Worker, location: Location, value: Any, seen: _Seen = None) -> None:
        """Let the model, and later reads of this step, see ``value`` at ``location``."""
        memo = worker.memo
        if memo is not None and memo.location == location and memo.step == worker.step:
            is_here = memo.is_here
            if is_here:
                value = self._assign(worker, location, value)
        else:
            owner, visit = self._ask(worker, location, seen)
            number = worker.next_number(location, visit)
            is_here = owner is None or owner == self.stage
            if is_here:
                value = self._here(worker, value)
                _met(self, worker, Write(number, location, visit, value, seen))
            elif owner is not None and worker.timeline is not None:
                self._wait_for_turn(worker, Read(number, location, visit, seen), owner)
        worker.memo = Memo(location, worker.step, value, is_here)

    def call(self, worker: Worker, path: str, arguments: Any, run: Callable[[Any], Any]) -> Any:
        """Run ``run(arguments)`` on the stage that holds ``path``; elsewhere return a lazy result.

        Calls do not count in the order of values, and leave the open visit open.
        """
        self._enter_step(worker)
        owner = None if self._owners is None else self._owners.holder_of(path)
        location = Location(path, "call")
        number = worker.next_number(location, worker.step)
        if owner is not None and owner != self.stage:
            assert self._make_lazy is not None
            ask = RemoteAsk(self, worker, number, owner, location, worker.step, "call")
            return self._make_lazy(ask)
        try:
            given = self._here(worker, arguments, at=number)
            result = self.agreement.call(worker, location, given, lambda: _run(worker, given, run))
        except Exception as error:
            self.alone(worker, error, at=number)
            raise
        self.publish(worker, number, location, result)
        return result

    def constant(self, worker: Worker, location: Location) -> RemoteAsk | None:
        """Ask for a weight: return the ask, or None on the stage that has it."""
        owner = None if self._owners is None else self._owners.holder_of(location.path)
        number = worker.next_number(location, worker.step)
        if owner is None or owner == self.stage:
            return None
        return RemoteAsk(self, worker, number, owner, location, worker.step, "constant")

    def publish(self, worker: Worker, number: int, location: Location, value: Any) -> None:
        """Make the answer to ask ``number`` available to the other stages, as it is now."""
        if self.link is not None and location != RESULT and worker.unshared is None:
            key = AskKey(worker.request, number)
            self.link.publish(key, location, self._snapshot(value))

    def surface_for(self, worker: Worker, name: str) -> Surface:
        """Return what a model of this process offers beside its values.

        Raises:
            NotSupportedError: The blocks run on an engine; ``name`` says what was called.
        """
        if self.surface is None:
            raise _has_no_surface(worker, name, self.where)
        return self.surface

    def check_barrier(self, worker: Worker, barrier: object) -> None:
        """Refuse a barrier beside a backward pass."""
        if self._owners is None:
            self.surface_for(worker, repr(barrier))

    def has_gate(self, worker: Worker) -> bool:
        """Whether steps are opened one by one, so that a loop over them waits for each."""
        return self.clock.opened(worker.request) is not None

    def begin_step(self, worker: Worker, step: int) -> None:
        """Pin what ``worker`` asks for from now on to ``step``; wait at its gate on an engine."""
        self._leave(worker)
        worker.memo = None
        worker.is_relaxed = False
        worker.step = step
        self._enter_step(worker)

    def restore_step(self, worker: Worker, step: int) -> None:
        """Pin ``worker`` to ``step`` again when a loop is over, without waiting for it.

        It runs in the ``finally`` of a generator, so it must not raise: the visit stays open.
        """
        worker.is_relaxed = False
        worker.step = step

    def _wait_for_turn(self, worker: Worker, ask: Read, owner: int) -> None:
        """See Note [Blocks that share names] in `interleave.timeline`."""
        moment = self.order.moment_of(worker, ask.place, ask.visit, owner)
        self.park(worker, Turn(ask.number, ask.location, ask.visit, moment))

    def _ask(self, worker: Worker, location: Location, seen: _Seen) -> tuple[int | None, int]:
        """Pass the step gate, check the order, leave the open visit; return owner and visit.

        A refused ask changes nothing: it has no number, and the open visit stays open.
        """
        if location == RESULT:
            self._leave(worker)
            self.order.end(worker)
            return None, self.clock.target(worker, location)
        place = location if seen is None else seen.place
        owner = None if self._owners is None else self._owners.owner_of(place)
        self._enter_step(worker)
        visit = self.clock.target(worker, place)
        self.order.check(worker, place, visit, owner, location)
        self._leave(worker)
        return owner, visit

    def _enter_step(self, worker: Worker) -> None:
        opened = self.clock.opened(worker.request)
        if opened is not None and worker.step > opened:
            if worker.request in self.finishing:
                raise loop_warning(worker, f"step {worker.step}")
            worker.held_up = worker.held_up if worker.unshared else None  # it has caught up
            self.park(worker, Step(worker.step))
        if worker.reached < worker.step:
            worker.reached = worker.step

    def _leave(self, worker: Worker) -> None:
        """Close the worker's open visit: its edits so far land, later ones do not."""
        if worker.closed_early is not None:
            self.order.check_no_late_edit(worker)
            worker.closed_early = None
        if worker.visit is not None:
            self._commit(worker)

    def _commit(self, worker: Worker, watching: Pull | None = None) -> None:
        visit, worker.visit = worker.visit, None
        if visit is not None:
            try:
                visit.commit() if worker.timeline is None else visit.commit_read()
            except Exception as error:
                self.alone(worker, error)
                raise
            if watching is not None:
                watch(worker, visit, f"{Visit(watching.location, watching.step)}")

    def park(self, worker: Worker, ask: Ask) -> Any:
        """Give the turn to the model until it, or another stage, answers ``ask``."""
        if getcurrent() is not worker.greenlet:
            raise OutsideTraceError(f"{ask} was made by something that is not its worker")
        if worker.is_calling or (not self.may_park_in_torch and worker.is_inside_torch()):
            raise self.alone(worker, park_refused(worker, str(ask), self.where))
        if isinstance(ask, Pull):
            self._commit(worker, watching=ask)
        elif isinstance(ask, Join):
            stay(self, worker)
        else:
            self._leave(worker)
        worker.ask = ask
        if isinstance(ask, (Read, Write)):
            self.parked.add(ask.place, worker)
        return worker.hand_over()

    def _settled(self, worker: Worker) -> Any:
        """Return the value of the open visit with the edits of its views in it."""
        assert worker.visit is not None
        try:
            return worker.visit.settle()
        except Exception as error:
            self.alone(worker, error)
            raise

    def _assign(self, worker: Worker, location: Location, value: Any) -> Any:
        """Replace the value of the visit that is open here; return it with nothing remote in it."""
        value = self._here(worker, value)
        if worker.visit is None:
            raise self.alone(worker, self.too_late(worker, location, worker.step))
        try:
            worker.visit.assign(value)
        except Exception as error:
            self.alone(worker, error)
            raise
        return value

    def _here(self, worker: Worker, value: Any, *, at: int | None = None) -> Any:
        """Return ``value`` with every remote leaf brought to this rank."""
        try:
            return map_leaves(
                value,
                lambda leaf: leaf._real_value() if issubclass(type(leaf), RemoteValue) else leaf,
            )
        except Exception as error:
            self.alone(worker, error, at=at)
            raise


def _has_no_surface(worker: Worker, name: str, where: str) -> NotSupportedError:
    return NotSupportedError(
        explain(
            f"{name} was called.",
            where=worker.where(),
            why="It works beside the forward of a model of this process, not on an engine, "
            "nor beside a backward pass.",
            todo="Leave it out, or run the block on a local model.",
            ran=where,
        )
    )


def _run(worker: Worker, arguments: Any, run: Callable[[Any], Any]) -> Any:
    """Run a call. It runs on this rank alone: what it draws, no other rank draws."""
    worker.is_calling = True
    randomness = worker.randomness
    kept = None if randomness is None else randomness.kept()
    try:
        return run(arguments)
    finally:
        worker.is_calling = False
        if randomness is not None and kept is not None:
            randomness.restore(kept)


def _met(asks: Asks, worker: Worker, ask: Read | Write) -> Any:
    """Park at ``ask``; refuse what a loop's step has passed, or what its forward lacks.

    The next visit is then one of a later forward, and no value of this step.
    """
    clock = asks.clock
    if not clock.is_sought(worker, Visit(ask.location, ask.visit)):
        return asks.park(worker, ask)
    begun = clock.begun()
    value = asks.park(worker, Read(ask.number, ask.location, ask.visit, ask.seen))
    if clock.begun() != begun:
        worker.is_relaxed = False  # what a block that catches this asks for is of this step too
        raise asks.too_late(worker, ask.location, worker.step)
    if isinstance(ask, Write) and worker.visit is not None:
        worker.visit.assign(ask.value)
    return value
