"""The one switch between a model's serve points and whoever serves.

A serve point's whole cost while nobody looks is one test of `Gate.serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.location import Location
    from nnsight_pp.envoys.source_calls import Calls


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
    """

    __slots__ = ("__weakref__", "is_skipping", "open", "running", "runs_skipped", "serve")

    def __init__(self, *, runs_skipped: bool = False) -> None:
        self.serve: Callable[[Location, Any], Any] | None = None
        self.runs_skipped = runs_skipped
        self.running: list[str] = []
        self.is_skipping = False
        self.open: dict[str, Calls] = {}

    def close(self) -> None:
        """Serve nothing any more, and forget the run."""
        self.serve = None
        self.is_skipping = False
        self.running.clear()
        self.open.clear()
