"""The worker's side of an interleaver: what a block asks for, and when it is refused.

The methods here run inside a worker. They number its asks, hold it at the step gate, keep the order
across stages, and park it where only the model or another stage can answer. The notes in
`interleave.interleaver` state the rules.

Note [Errors that one stage sees alone]
    A local ask that is never served, a write that does not fit, or an answer that another stage
    cannot send is raised on one stage only. If the block catches it, that stage goes another way
    than the others, so the worker remembers the first such error and ends with it even when it was
    caught. An error that every stage raises at the same line (order, unknown names) may be caught.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from greenlet import getcurrent

from nnsight_pp.core.ask import AskKey, Pull, Read, Step, Write
from nnsight_pp.core.location import RESULT, Location, Visit
from nnsight_pp.core.protocols import DeferredError, RemoteValue
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import OutOfOrderError, OutsideTraceError, ParkRefusedError, explain
from nnsight_pp.interleave.parked import Parked
from nnsight_pp.interleave.remote import RemoteAsk
from nnsight_pp.interleave.unwind import loop_warning, out_of_order
from nnsight_pp.interleave.worker import Mark, Memo, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.ask import Ask
    from nnsight_pp.core.protocols import Link, Owners, Pending, Switch
    from nnsight_pp.interleave.clock import Clock

# Sorts behind every stage: after the result of a request nothing can be asked for.
_BEHIND_ALL = 1 << 30


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
    ) -> None:
        self.clock = clock
        self.stage = stage
        self.where = where
        self.link = link
        self.parked = Parked()
        # Requests whose last step is over: their pulls may be waited for in place.
        self.finishing: set[str] = set()
        self._switch = switch
        self._owners = owners
        self._make_lazy = make_lazy
        self._snapshot = snapshot
        self._position_of = None if owners is None else owners.position_of

    def read(self, worker: Worker, location: Location) -> Any:
        """Return the value of ``location`` at the worker's step, parking until it is there."""
        memo = worker.memo
        if memo is not None and memo.location == location and memo.step == worker.step:
            return memo.value
        owner, visit = self._ask(worker, location)
        number = worker.next_number(location, visit)
        if owner is None or owner == self.stage:
            value = self._park(worker, Read(number, location, visit))
        else:
            assert self._make_lazy is not None
            value = self._make_lazy(RemoteAsk(self, worker, number, owner, location, visit))
        worker.memo = Memo(location, worker.step, value, owner is None or owner == self.stage)
        return value

    def write(self, worker: Worker, location: Location, value: Any) -> None:
        """Let the model, and later reads of this step, see ``value`` at ``location``."""
        memo = worker.memo
        if memo is not None and memo.location == location and memo.step == worker.step:
            is_here = memo.is_here
            if is_here:
                value = self._assign(worker, location, value)
        else:
            owner, visit = self._ask(worker, location)
            number = worker.next_number(location, visit)
            is_here = owner is None or owner == self.stage
            if is_here:
                value = self._here(worker, value)
                self._park(worker, Write(number, location, visit, value))
        worker.memo = Memo(location, worker.step, value, is_here)

    def call(self, worker: Worker, path: str, arguments: Any, run: Callable[[Any], Any]) -> Any:
        """Run ``run(arguments)`` on the stage that holds the module at ``path``.

        Calls do not count in the order of values, and leave the open visit open.

        Returns:
            The result on that stage; on the others what stands for it.
        """
        self._enter_step(worker)
        owner = None if self._owners is None else self._owners.holder_of(path)
        location = Location(path, "call")
        number = worker.next_number(location, worker.step)
        if owner is not None and owner != self.stage:
            assert self._make_lazy is not None
            ask = RemoteAsk(self, worker, number, owner, location, worker.step, "call")
            return self._make_lazy(ask)
        arguments = self._here(worker, arguments)
        try:
            result = run(arguments)
        except Exception as error:
            self.alone(worker, error)
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
        if self.link is not None and location != RESULT:
            key = AskKey(worker.request, number)
            self.link.publish(key, location, self._snapshot(value))

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

        It runs in the ``finally`` of a generator, where an exception would be lost: it never
        raises, and leaves the open visit to the next ask.
        """
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
        assert self.link is not None
        opened = self.clock.opened(worker.request)
        is_over = worker.request in self.finishing or (opened is not None and ask.step < opened)
        in_place = is_over or ask.owner < self.stage or ask.kind == "constant"
        if not in_place and in_torch and not self._switch.may_park_in_torch:
            raise worker.alone(self._park_refused(worker, ask))
        key = AskKey(worker.request, ask.number)
        link = self.link

        def again(is_last: bool) -> Pending:
            kind = f"last {ask.kind}" if is_last and ask.kind == "call" else ask.kind
            return link.pull(key, ask.owner, ask.location, ask.step, picks, kind)

        pending: Pending | None = again(worker.request in self.finishing)
        if in_place:
            try:
                return pending.wait()
            except DeferredError:
                pending = None
                worker.held_up = ask.visit
            except Exception as error:
                worker.alone(error, is_echo=True)
                raise
            if in_torch and not self._switch.may_park_in_torch:
                raise worker.alone(self._park_refused(worker, ask))
        return self._park(worker, Pull(ask.location, ask.step, pending, again))

    # -- the rules -----------------------------------------------------------------------------

    def _ask(self, worker: Worker, location: Location) -> tuple[int | None, int]:
        """Pass the step gate, check the order, leave the open visit; return owner and visit.

        A refused ask changes nothing: it has no number, and the open visit stays open.
        """
        if location == RESULT:
            self._leave(worker)
            worker.mark = Mark(worker.mark.step, _BEHIND_ALL, 0)
            return None, self.clock.target(worker, location)
        owner = None if self._owners is None else self._owners.owner_of(location)
        self._enter_step(worker)
        visit = self.clock.target(worker, location)
        opened = self.clock.opened(worker.request)
        if opened is not None and visit < opened:
            raise self.too_late(worker, location, visit)
        if owner is not None:
            self._check_order(worker, location, visit, owner)
        # Last, as only the owner can tell.
        if owner is None or owner == self.stage:
            self._check_not_passed(worker, location, visit)
        self._leave(worker)
        return owner, visit

    def _check_not_passed(self, worker: Worker, location: Location, visit: int) -> None:
        is_late = self.has_gate(worker) and worker.request in self.finishing
        if is_late or self.clock.has_passed(worker, location, visit):
            raise self.alone(worker, self.too_late(worker, location, visit), at=worker.asked)

    def _check_order(self, worker: Worker, location: Location, visit: int, owner: int) -> None:
        """Refuse a step backwards; note how far the worker is now.

        Where the places of both are known, every number of stages refuses the same asks at once, so
        the block may catch it. Else whether it is refused at once depends on how the model is cut.
        """
        position = None if self._position_of is None else self._position_of(location)
        mark = worker.mark
        if mark.stage == _BEHIND_ALL:
            why = "The result is the last thing that a block can ask for."
            raise out_of_order(worker, Visit(location, visit), self.where, why)
        if mark.step == visit:
            known = None if position is None or mark.position is None else position - mark.position
            if owner < mark.stage:
                why = (
                    f"It belongs to stage {owner}, and the block has already asked stage "
                    f"{mark.stage} in this step. A block must ask for values in the order in which "
                    "the model computes them."
                )
                error = out_of_order(worker, Visit(location, visit), self.where, why)
                raise error if known is not None else self.alone(worker, error, at=worker.asked)
            if owner == mark.stage and known is not None and known <= 0:
                raise self.too_late(worker, location, visit)
        worker.mark = Mark(visit, owner, position)

    def _enter_step(self, worker: Worker) -> None:
        opened = self.clock.opened(worker.request)
        if opened is None or worker.step <= opened:
            return
        if worker.request in self.finishing:
            raise loop_warning(worker, f"step {worker.step}")
        self._park(worker, Step(worker.step))

    def _leave(self, worker: Worker) -> None:
        """Close the worker's open visit: its edits so far land, later ones do not."""
        visit, worker.visit = worker.visit, None
        if visit is not None:
            try:
                visit.commit()
            except Exception as error:
                self.alone(worker, error)
                raise

    def _park(self, worker: Worker, ask: Ask) -> Any:
        if getcurrent() is not worker._greenlet:
            raise OutsideTraceError(f"{ask} was made by something that is not its worker")
        self._leave(worker)
        worker.ask = ask
        if isinstance(ask, (Read, Write)):
            self.parked.add(ask.location, worker)
        return worker.hand_over()

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

    def _here(self, worker: Worker, value: Any) -> Any:
        """Return ``value`` with every remote leaf brought to this rank."""
        try:
            return map_leaves(
                value,
                lambda leaf: leaf._real_value() if issubclass(type(leaf), RemoteValue) else leaf,
            )
        except Exception as error:
            self.alone(worker, error)
            raise

    # -- the errors ----------------------------------------------------------------------------

    def alone(self, worker: Worker, error: Exception, *, at: int | None = None) -> Exception:
        """Note that ``error`` is raised on this stage only (where stages are a notion at all)."""
        return error if self._owners is None else worker.alone(error, at=at)

    def too_late(self, worker: Worker, location: Location, visit: int) -> OutOfOrderError:
        """Return the error for an ask that nothing will answer any more."""
        late = worker.held_up
        if late is None or late.number != visit:
            return out_of_order(worker, Visit(location, visit), self.where)
        why = (
            f"The block waited here for {late}, which its stage could run only after the step: it "
            "uses a value of a later stage. Use the result later in the block, or in a second "
            "trace."
        )
        return out_of_order(worker, Visit(location, visit), self.where, why)

    def _park_refused(self, worker: Worker, ask: RemoteAsk) -> ParkRefusedError:
        return ParkRefusedError(
            explain(
                f"{ask.visit} belongs to a later stage and was used inside a torch call.",
                where=worker.where(),
                why="The worker would have to park inside torch, and the exchange of torch's "
                "thread-local state is off (NNSIGHT_PP_TLS_SWAP=0) or not complete on this torch.",
                todo="Unset NNSIGHT_PP_TLS_SWAP, or use the value one step later.",
                ran=self.where,
            )
        )
