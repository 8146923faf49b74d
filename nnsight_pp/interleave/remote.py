"""One ask that another stage answers, as its lazy value holds it, and how its answer is brought.

What may be waited for in place, and what parks the worker, is the rule of Note [A rank waits only
for answers that exist] in `interleave.interleaver`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.ask import AskKey, Pull
from nnsight_pp.core.location import Location, Visit
from nnsight_pp.core.protocols import DeferredError
from nnsight_pp.core.report import PullRecord
from nnsight_pp.errors import OutsideTraceError, ValueUnavailableError, explain
from nnsight_pp.interleave.habits import Habits
from nnsight_pp.interleave.unwind import out_of_order, park_refused
from nnsight_pp.interleave.worker import running_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.protocols import Pending
    from nnsight_pp.errors import Where
    from nnsight_pp.interleave.asks import Asks
    from nnsight_pp.interleave.worker import Worker


@final
class RemoteAsk:
    """What a lazy value needs to bring its data: the ask, its owner, and its worker."""

    __slots__ = ("_ahead", "_asks", "_worker", "kind", "location", "number", "owner", "step")

    # Whether this rank has the value itself.
    is_here = False

    def __init__(
        self,
        asks: Asks,
        worker: Worker,
        number: int,
        owner: int,
        location: Location,
        step: int,
        kind: str = "value",
    ) -> None:
        self._asks = asks
        self._worker = worker
        self.number = number
        self.owner = owner
        self.location = location
        self.step = step
        # What is asked for: see `core.protocols.Link.pull`.
        self.kind = kind
        # See Note [Asked ahead] in `interleave.habits`.
        self._ahead: dict[str, Pending] = {}
        habits = worker.habits
        if habits is not None and self._may_be_ahead and worker.unshared is None:
            key = AskKey(worker.request, number)
            for part, picks in habits.take(location).items():
                assert asks.link is not None
                self._ahead[part] = asks.link.pull(key, owner, location, step, picks)

    def __del__(self) -> None:
        """Note that nobody can pull this answer any more. On any thread, so it only notes."""
        if self.kind != "constant" and not self._worker.is_dropped:
            step = None if self.kind == "call" else self.step
            self._asks.let_go.add(self._worker.request, self.owner, self.number, step)

    @property
    def _may_be_ahead(self) -> bool:
        """Whether it is a value that may be asked for before a line needs it."""
        return self.kind == "value" and self.owner < self._asks.stage

    @property
    def shard(self) -> RemoteAsk | None:
        """The weight itself, where it is one: its owner has all of it, or its column's part."""
        return self if self.kind == "constant" else None

    @property
    def visit(self) -> Visit:
        """What was asked for, in its printed form."""
        return Visit(self.location, self.step)

    @property
    def sums_alike(self) -> bool:
        """See `core.protocols.Link`."""
        return self._asks.link is not None and self._asks.link.sums_alike

    @property
    def casts_copy(self) -> bool:
        """See `core.protocols.Link`. A call gives what the block's own arguments make of it."""
        link = self._asks.link
        return link is not None and link.casts_copy and self.kind != "call"

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """Return the owner's answer, with ``picks`` applied by the owner.

        Waits in place for an earlier stage or an earlier step; parks the worker for a later
        stage's value of this step, and for a call that its owner could not run yet.

        Args:
            picks: Index steps that the owner applies before it sends.
            in_torch: Whether torch's own frames stand between the caller and the block.
        """
        asker, asks = self._worker, self._asks
        worker = self._puller()
        link = asks.link
        assert link is not None
        key = AskKey(asker.request, self.number)
        ahead = self._come_ahead(repr(picks), picks)
        asked: list[Pending] = [] if ahead is None else [ahead]

        where = worker.where()
        is_in_place = self._is_in_place(worker)

        def again(is_last: bool) -> Pending:
            kind = f"last {self.kind}" if is_last and self.kind == "call" else self.kind
            asked.append(
                link.pull(
                    key, self.owner, self.location, self.step, picks, kind, at_once=is_in_place
                )
            )
            return asked[-1]

        if not is_in_place:
            self._check_may_park(worker, in_torch)
        is_last = asker.request in asks.finishing
        pending: Pending | None = again(is_last) if ahead is None else ahead
        if is_in_place:
            assert pending is not None
            try:
                value = pending.wait()
            except DeferredError:
                pending = None
            except Exception as error:
                worker.alone(error, is_echo=True)
                raise
            else:
                self._note(worker, where, asked)
                return value
            self._check_may_park(worker, in_torch)
        if self.kind == "call":
            worker.held_up = self.visit
        value = asks.park(worker, Pull(self.location, self.step, pending, again))
        self._note(worker, where, asked)
        return value

    def _come_ahead(self, part: str, picks: Sequence[Any]) -> Pending | None:
        """Return the answer that was asked for ahead, if it is of ``picks``; note what is asked."""
        if not self._may_be_ahead:
            return None  # nothing would ever take the note
        habits = self._worker.habits = self._worker.habits or Habits()
        if self._ahead and part not in self._ahead:
            habits.break_off(self.location)
        else:
            habits.note(self.location, part, picks)
        return self._ahead.pop(part, None)

    def _puller(self) -> Worker:
        """Return the worker that runs now: the one that asked, or one that shares names with it."""
        asker = self._worker
        running = running_worker()
        if running is not None and (running is asker or running.shares_names_with(asker)):
            if running.unshared is not None:
                raise ValueUnavailableError(
                    explain(
                        f"{self.visit} cannot be brought from stage {self.owner} any more.",
                        where=running.where(),
                        why="An error that only this stage has seen was caught, or a block that "
                        "this one shares names with has failed, so the stages no longer run the "
                        "same lines.",
                        todo="Do not catch that error.",
                        ran=self._asks.where,
                    )
                )
            return running
        raise OutsideTraceError(
            explain(
                f"The remote value {self.visit} was used outside of its trace.",
                why="A value of another stage can be brought only while its block runs.",
                todo="Save it with `.save()`, and use it after the trace.",
            )
        )

    def _is_in_place(self, worker: Worker) -> bool:
        """Whether the answer exists by now, on a stage that needs nothing of this one."""
        asks = self._asks
        if self._worker.request in asks.finishing or self.kind == "constant":
            return True
        if worker.timeline is not None and worker.timeline.is_settled:
            return True
        # Workers that share names are in the same step, so the one that runs knows which it is.
        opened = asks.clock.opened(worker.request)
        return self.owner < asks.stage or (opened is not None and self.step < opened)

    def _check_may_park(self, worker: Worker, in_torch: bool) -> None:
        if worker.timeline is not None:
            why = (
                f"The call runs on stage {self.owner} later in the step. A block that shares names "
                "with others cannot wait for it meanwhile: they would go on before it."
            )
            raise worker.alone(out_of_order(worker, self.visit, self._asks.where, why))
        if in_torch and not self._asks.may_park_in_torch:
            raise worker.alone(park_refused(worker, str(self.visit), self._asks.where))

    def _note(self, worker: Worker, where: Where | None, asked: Sequence[Pending]) -> None:
        """Add what this pull has cost to the worker's records."""
        pulls = worker.pulls
        filename, line = ("", 0) if where is None else (where.filename, where.line)
        place = self.owner, self.location, line
        before = pulls.get(place)
        pulls[place] = PullRecord(
            self.owner,
            str(self.location),
            filename,
            line,
            (before.num_pulls if before else 0) + 1,
            (before.bytes_received if before else 0) + sum(one.bytes_received for one in asked),
            (before.waited_s if before else 0.0) + sum(one.waited_s for one in asked),
        )

    def echo(self, error: Exception) -> None:
        """Note that ``error`` comes late: the owner raised it at the line that meant it."""
        running = running_worker()
        if running is not None and running.turns is self._asks:
            running.alone(error, is_echo=True)


def bring(
    worker: Worker,
    resume: Callable[[Worker, Any], None],
    throw: Callable[[Worker, BaseException], None],
    *,
    is_last: bool,
) -> None:
    """Give ``worker`` what it is parked on of later stages, as long as it is parked on such values.

    Args:
        worker: The worker.
        resume: Gives a worker the turn, with a value.
        throw: Gives a worker the turn, with an error.
        is_last: Whether its request is over, so that a call is waited for.
    """
    while isinstance(ask := worker.ask, Pull):
        if ask.pending is None:
            ask.pending = ask.again(is_last)
        try:
            value = ask.pending.wait()
        except DeferredError:
            ask.pending = None
            if not is_last:
                break
        except Exception as error:
            throw(worker, worker.alone(error, is_echo=True))
        else:
            resume(worker, value)
