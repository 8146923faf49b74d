"""What a worker may ask for now, and what the refusal says.

Within a step, asks go forward through the stages and through each stage's locations (Note [Order
across stages] in `interleave.interleaver`). Who makes the asks is `interleave.asks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from nnsight_pp.core.ask import BEHIND_ALL, Moment
from nnsight_pp.core.location import Visit
from nnsight_pp.errors import NotSupportedError, OutOfOrderError, explain
from nnsight_pp.interleave.unwind import out_of_order
from nnsight_pp.interleave.worker import Mark

if TYPE_CHECKING:
    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Owners
    from nnsight_pp.interleave.clock import Clock
    from nnsight_pp.interleave.worker import Worker


@final
class Order:
    """The checks of one rank. The arguments are those of `interleaver.Interleaver`."""

    def __init__(self, clock: Clock, *, stage: int, owners: Owners | None, where: str) -> None:
        self._clock = clock
        self._stage = stage
        self._where = where
        self._has_stages = owners is not None
        self._owners = owners
        # Requests whose last step is over: their pulls may be waited for in place.
        self.finishing: set[str] = set()

    def check(
        self, worker: Worker, place: Location, visit: int, owner: int | None, location: Location
    ) -> None:
        """Refuse an ask that cannot be answered any more; note how far the worker is now.

        ``location`` is asked for, and ``place`` is where it is served: see `core.lens`.

        Raises:
            OutOfOrderError: The model, or the block, is already past it.
        """
        if worker.mark.stage == BEHIND_ALL and owner is not None:
            why = "The result is the last thing that a block can ask for."
            raise out_of_order(worker, Visit(location, visit), self._where, why)
        opened = self._clock.opened(worker.request)
        if worker.timeline is not None and self._is_past(worker, place, visit, owner):
            raise self.too_late(worker, location, visit)
        # Over on every stage, unless a call has held this worker up: others may have served it.
        if opened is not None and visit < opened <= worker.reached:
            raise self.too_late(worker, location, visit)
        if owner is not None:
            self._check_forward(worker, place, visit, owner, location)
        # Last, as only the owner can tell.
        if owner is None or owner == self._stage:
            is_late = opened is not None and worker.request in self.finishing
            if is_late or self._clock.has_passed(worker, place, visit):
                raise self.alone(worker, self.too_late(worker, location, visit), at=worker.asked)

    def _is_past(self, worker: Worker, place: Location, visit: int, owner: int | None) -> bool:
        """Whether the blocks that share names with this one are past ``place``."""
        if owner is None:
            return False
        assert worker.timeline is not None
        return self.moment_of(worker, place, visit, owner) < worker.timeline.now

    def moment_of(self, worker: Worker, place: Location, visit: int, owner: int) -> Moment:
        """Return when in a run ``place`` is computed, for a worker with a timeline.

        Raises:
            NotSupportedError: It is not known.
        """
        position = None if self._owners is None else self._owners.position_of(place)
        if position is None or place.kind == "skip":
            raise NotSupportedError(
                explain(
                    f"{place} was asked for in a block that shares names with others.",
                    where=worker.where(),
                    why="Such blocks run in the order in which the model computes what they ask "
                    "for, and this has no one place in a forward.",
                    todo="Read it in a block that shares no names, or in a trace of its own.",
                    ran=self._where,
                )
            )
        return Moment(visit, owner, position)

    @staticmethod
    def end(worker: Worker) -> None:
        """Note that ``worker`` asks for the result, behind which there is nothing."""
        if worker.note_growth is not None:
            worker.note_growth(worker.mark)
        worker.mark = Mark(worker.mark.step, BEHIND_ALL, 0)

    def _check_forward(
        self, worker: Worker, place: Location, visit: int, owner: int, location: Location
    ) -> None:
        """Refuse a step backwards; note how far the worker is now.

        Where the places of both are known, every number of stages refuses the same asks at once, so
        the block may catch it. Else whether it is refused at once depends on how the model is cut.
        """
        mark = worker.mark
        if worker.note_growth is not None:
            worker.note_growth(mark)
        if self._owners is not None and place.kind != "skip":  # the usual case: further on
            at, known_at = self._owners.position_of(place), mark.position
            is_known = at is not None and known_at is not None
            if mark.step != visit or (is_known and (owner, at) > (mark.stage, known_at)):
                worker.mark = Mark(visit, owner, at, place)
                return
        position, from_stage, from_position = self._place_of(worker, place, owner)
        times = 0
        if mark.step == visit:
            known = None
            if from_position is not None and mark.position is not None:
                known = from_position - mark.position
            if from_stage < mark.stage:
                why = (
                    f"It belongs to stage {from_stage}, and the block has already asked stage "
                    f"{mark.stage} in this step. A block must ask for values in the order in which "
                    "the model computes them."
                )
                error = out_of_order(worker, Visit(location, visit), self._where, why)
                raise error if known is not None else self.alone(worker, error, at=worker.asked)
            # At one place several values may stand in one another, and come in any order.
            is_again = known == 0 and mark.place == place
            if from_stage == mark.stage and known is not None and known <= 0 and not is_again:
                raise self.too_late(worker, location, visit)
            times = mark.times + 1 if is_again else 0
        worker.mark = Mark(visit, owner, position, place, times)

    def _place_of(
        self, worker: Worker, location: Location, owner: int
    ) -> tuple[int | None, int, int | None]:
        """Return the place of ``location``; the stage and the place before which it is asked for.

        A skip is asked for up to the module's input, and is over right before its output.
        """
        owners = self._owners
        if owners is None:
            return None, owner, None
        position = owners.position_of(location)
        if location.kind != "skip":
            return position, owner, position
        into = location._replace(kind="input")
        before = owners.position_of(into)
        if position is None or before is None:
            raise NotSupportedError(
                explain(
                    f"{location} was called.",
                    where=worker.where(),
                    why="On an engine only a module can be skipped that a forward runs at one "
                    "place, once; this one it runs several times, or only sometimes.",
                    todo="Skip the module that holds it, or assign to its `.output`.",
                )
            )
        # The input itself may have been asked for just before.
        return position, owners.owner_of(into) or 0, before + 1

    def late_edit(self, worker: Worker) -> OutOfOrderError | None:
        """Return what `check_no_late_edit` raises, or None."""
        try:
            self.check_no_late_edit(worker)
        except OutOfOrderError as error:
            return error
        return None

    def check_no_late_edit(self, worker: Worker) -> None:
        """See Note [A wait for a call closes the visit] in `interleave.asks`.

        Raises:
            OutOfOrderError: An edit came too late for the model.
        """
        early = worker.closed_early
        if early is None or not early.visit.was_edited_since():
            return
        worker.closed_early = None
        why = (
            f"It was edited after the block had waited for {early.wait}, and by then the model had "
            "gone on. Edit it before that result is used, or use a second trace."
        )
        if worker.where() is None:  # the block has ended: the line that waited is the last known
            worker.error_at = early.where
        raise self.alone(worker, out_of_order(worker, early.edited, self._where, why))

    def alone(self, worker: Worker, error: Exception, *, at: int | None = None) -> Exception:
        """Note that ``error`` is raised on this stage only (where stages are a notion at all)."""
        return worker.alone(error, at=at) if self._has_stages else error

    def too_late(self, worker: Worker, location: Location, visit: int) -> OutOfOrderError:
        """Return the error for an ask that nothing will answer any more."""
        late = worker.held_up
        if late is None or late.number > visit:
            return out_of_order(worker, Visit(location, visit), self._where)
        why = (
            f"The block waited for {late}, a call that another stage could answer only when this "
            "stage was through with the step. Use the result later in the block, or in a second "
            "trace."
        )
        return out_of_order(worker, Visit(location, visit), self._where, why)
