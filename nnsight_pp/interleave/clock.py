"""Which visit an ask means, and whether it is now.

Two clocks. On an engine one forward of a request is one step, and an ask belongs to a step: a
`StepClock` opens and closes steps, and a worker that asks ahead parks on the step gate. In this
process one call may run a module any number of times: a `VisitClock` counts each location's own
visits, and there is no gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from nnsight_pp.core.location import RESULT, ROOT, Location, Visit

if TYPE_CHECKING:
    from nnsight_pp.interleave.worker import Worker

NEVER = -1
_WHOLE_MODEL = Location(ROOT, "input")


@final
class VisitClock:
    """Counts the visits of each location since the run began."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[Location, int] = {}

    def target(self, worker: Worker, location: Location) -> int:
        """Return the visit that an ask made now means.

        A loop pins the visit of its body's first ask; once a pinned visit beyond the first was
        served, later asks of the body mean the next visit of their own location.
        """
        return self._count(location) if worker.is_relaxed else worker.step

    def _count(self, location: Location) -> int:
        """Return how many visits of ``location`` are over; a skip is over with its input.

        A skip is not offered in every run, but its place is known: right behind the input.
        """
        if location.kind == "skip":
            location = Location(location.path, "input")
        return self.counts.get(location, 0)

    def now(self, worker: Worker, location: Location) -> int:
        """Return the number of the visit that is going on."""
        return self._count(location) - (location.kind == "skip")

    def passed(self, location: Location) -> None:
        """Count a visit of ``location`` that is over."""
        self.counts[location] = self.counts.get(location, 0) + 1

    def has_passed(self, worker: Worker, location: Location, visit: int) -> bool:
        """Whether ``visit`` of ``location`` is over."""
        return self._count(location) > visit

    def begun(self) -> int:
        """Return how many forwards of the whole model have begun."""
        return self.counts.get(_WHOLE_MODEL, 0)

    def is_sought(self, worker: Worker, asked: Visit) -> bool:
        """Whether ``asked``, in a loop, may be one of a forward behind this one.

        It is not the number of the loop's step, and the loop's steps are forwards of the model.
        """
        is_of_forward = asked.location != RESULT
        return (
            worker.is_relaxed and is_of_forward and asked.number != worker.step and self.begun() > 1
        )

    def opened(self, request: str) -> int | None:
        """Return None: there is no step gate."""
        return None

    def drop(self, request: str) -> None:
        """Nothing is kept by request."""


@final
class StepClock:
    """Knows which step of each request is open here, and which are closed."""

    __slots__ = ("_closed", "_opened", "counts")

    def __init__(self) -> None:
        self.counts = None  # a step is over when it is closed
        # Invariant: closed <= opened, and both only grow.
        self._opened: dict[str, int] = {}
        self._closed: dict[str, int] = {}

    def target(self, worker: Worker, location: Location) -> int:
        """Return the step that an ask made now belongs to."""
        return worker.step

    def now(self, worker: Worker, location: Location) -> int:
        """Return the request's open step."""
        return self._opened.get(worker.request, NEVER)

    def passed(self, location: Location) -> None:
        """Nothing to count: a step is over when it is closed."""

    def begun(self) -> int:
        """Return 0: forwards are of requests."""
        return 0

    def is_sought(self, worker: Worker, asked: Visit) -> bool:
        """Return False: an ask belongs to a step."""
        return False

    def open(self, request: str, step: int) -> None:
        """Open ``step`` for ``request``."""
        self._opened[request] = max(step, self._opened.get(request, NEVER))

    def close(self, request: str, step: int) -> None:
        """Close every step of ``request`` up to ``step``."""
        self._closed[request] = max(step, self._closed.get(request, NEVER))

    def opened(self, request: str) -> int:
        """Return the last opened step of ``request``, `NEVER` before the first."""
        return self._opened.get(request, NEVER)

    def has_passed(self, worker: Worker, location: Location, visit: int) -> bool:
        """Whether the step ``visit`` is closed."""
        return visit <= self._closed.get(worker.request, NEVER)

    def closed(self, request: str) -> int:
        """Return the last closed step of ``request``, `NEVER` before the first."""
        return self._closed.get(request, NEVER)

    def drop(self, request: str) -> None:
        """Forget ``request``."""
        self._opened.pop(request, None)
        self._closed.pop(request, None)


Clock = VisitClock | StepClock
