"""Who is parked where: one dictionary look-up for the model, at every value it computes."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from nnsight_pp.core.location import Location
    from nnsight_pp.interleave.worker import Worker


@final
class Parked:
    """Workers by the location that they are parked on, each list in the order of their blocks.

    Workers of one seat stand in the order of arrival.
    """

    __slots__ = ("by_location",)

    def __init__(self) -> None:
        # Invariant: no empty list is kept, so membership means that somebody is parked.
        self.by_location: dict[Location, list[Worker]] = {}

    def add(self, location: Location, worker: Worker) -> None:
        """Park ``worker`` at ``location``."""
        workers = self.by_location.get(location)
        if workers is None:
            self.by_location[location] = [worker]
        elif workers[-1].seat <= worker.seat:  # the usual case
            workers.append(worker)
        else:
            insort(workers, worker, key=_seat)

    def remove(self, location: Location, worker: Worker) -> None:
        """Take ``worker`` away from ``location``."""
        workers = self.by_location[location]
        if len(workers) > 1:
            workers.remove(worker)
        else:
            del self.by_location[location]

    def at(self, location: Location) -> list[Worker] | None:
        """Return the workers parked at ``location``, or None."""
        return self.by_location.get(location)

    def __len__(self) -> int:
        return sum(len(workers) for workers in self.by_location.values())


def _seat(worker: Worker) -> int:
    return worker.seat
