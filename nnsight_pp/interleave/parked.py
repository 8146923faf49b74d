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

    __slots__ = ("_at",)

    def __init__(self) -> None:
        # Invariant: no empty list is kept, so membership means that somebody is parked.
        self._at: dict[Location, list[Worker]] = {}

    def add(self, location: Location, worker: Worker) -> None:
        """Park ``worker`` at ``location``."""
        insort(self._at.setdefault(location, []), worker, key=_seat)

    def remove(self, location: Location, worker: Worker) -> None:
        """Take ``worker`` away from ``location``."""
        workers = self._at[location]
        workers.remove(worker)
        if not workers:
            del self._at[location]

    def at(self, location: Location) -> list[Worker] | None:
        """Return the workers parked at ``location``, or None."""
        return self._at.get(location)

    def __len__(self) -> int:
        return sum(len(workers) for workers in self._at.values())


def _seat(worker: Worker) -> int:
    return worker.seat
