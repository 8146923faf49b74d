"""The one switch between a model's serve points and whoever serves.

A serve point's whole cost while nobody looks is one test of `Gate.serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.location import Location
    from nnsight_pp.envoys.source_calls import Calls
    from nnsight_pp.interleave.interleaver import Interleaver


@final
class Gate:
    """Shared by all serve points of one tree. The points hold it weakly: its tree keeps it.

    Attributes:
        serve: Takes a location and its value, returns the value that the model goes on with.
            None while no run is on.
        running: Paths of the modules that run now, for those that hold a shared module.
        is_skipping: Whether a block of this run has asked to skip anything.
        runs_skipped: Whether a skipped module is run all the same, for the rows of others.
        open: The calls of rewritten functions that run now, by the path of the function.
        parked: Where a worker is parked. With it, a point may leave out the calls of `serve` that
            would serve nobody; None where `serve` is to be called at every value.
        observers: Where something else looks on, or None.
        counts: How many visits of each location are over, where the run counts them, or None. A
            point that leaves out a call of `serve` counts its visit here.
        driver: The greenlet whose calls are part of the run; None where all are.
    """

    # Known to csrc/serve_point.cpp by their names.
    __slots__ = (
        "__weakref__", "counts", "driver", "is_skipping", "observers", "open", "parked", "running",
        "runs_skipped", "serve",
    )  # fmt: skip

    def __init__(self, *, runs_skipped: bool = False) -> None:
        self.serve: Callable[[Location, Any], Any] | None = None
        self.runs_skipped = runs_skipped
        self.parked: dict[Location, Any] | None = None
        self.observers: dict[Location, Any] | None = None
        self.counts: dict[Location, int] | None = None
        self.driver: Any = None  # greenlet has no type for it
        self.running: list[str] = []
        self.is_skipping = False
        self.open: dict[str, Calls] = {}

    def show(self, turns: Interleaver) -> None:
        """Let the points see for themselves where ``turns`` has nobody to serve."""
        self.parked = turns.asks.parked.by_location
        self.observers = turns.observers.at
        self.counts = turns.clock.counts

    def close(self) -> None:
        """Serve nothing any more, and forget the run."""
        self.serve = None
        self.parked = self.observers = self.counts = self.driver = None
        self.is_skipping = False
        self.running.clear()
        self.open.clear()
