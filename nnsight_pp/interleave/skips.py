"""Who skips a module that runs all the same, for other requests of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from nnsight_pp.core.ask import Write

if TYPE_CHECKING:
    from nnsight_pp.core.location import Location
    from nnsight_pp.interleave.clock import Clock
    from nnsight_pp.interleave.parked import Parked
    from nnsight_pp.interleave.worker import Worker


@final
class Skips:
    """The workers that wait for a module, which they skip, to have run.

    Args:
        parked: Who is parked where.
        clock: Tells which visit is now.
    """

    __slots__ = ("_clock", "_parked", "held")

    def __init__(self, parked: Parked, clock: Clock) -> None:
        self._parked = parked
        self._clock = clock
        self.held: list[Worker] = []

    def hold(self, location: Location) -> None:
        """Let those who skip a module, at its ``location`` "skip", wait until it has run.

        They are served at "skipped", with its output; who asks from now on comes too late.
        """
        behind = location._replace(kind="skipped")
        for worker in tuple(self._parked.at(location) or ()):
            ask = worker.ask
            if (
                isinstance(ask, Write)
                and worker.cut is not None
                and ask.visit == self._clock.now(worker, location)
                and not self.is_inside(worker, location)
            ):
                self._parked.remove(location, worker)
                ask.location = behind
                self._parked.add(behind, worker)
                self.held.append(worker)

    def is_inside(self, worker: Worker, location: Location) -> bool:
        """Whether ``location`` lies inside a module that the request of ``worker`` skips now."""
        return any(
            one.rows_of == worker.rows_of
            and isinstance(one.ask, Write)
            and location.path.startswith(f"{one.ask.location.path}.")
            for one in self.held
        )

    def leave(self, worker: Worker) -> None:
        """Note that ``worker`` waits no more."""
        if worker in self.held:
            self.held.remove(worker)

    def __len__(self) -> int:
        return len(self.held)
