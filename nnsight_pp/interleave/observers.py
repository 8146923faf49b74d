"""Who sees every value of a location, for one worker, once all workers have had it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Joiner
    from nnsight_pp.interleave.worker import Worker


@final
class Observers:
    """The observers of one rank, each until its worker's request is dropped.

    Attributes:
        at: By location: the workers, and what is called with each value.
    """

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at: dict[Location, list[tuple[Worker, Callable[[Any], None]]]] = {}

    def add(self, calls: Iterable[tuple[Location, Callable[[Any], None]]], worker: Worker) -> None:
        """Let each of ``calls`` see all values of its location, for ``worker``, after edits."""
        at = self.at
        for location, call in calls:
            known = at.get(location)
            if known is None:
                at[location] = [(worker, call)]
            else:
                known.append((worker, call))

    def show(self, location: Location, value: Any, joiner: Joiner | None) -> None:
        """Let those who observe ``location`` see ``value``, whole, or the error in its place."""
        calls = self.at.get(location)
        if calls is None:
            return
        if joiner is not None:
            joined = joiner.join(location, value)
            value = joined.value if not joined.refused else joined.error()
        for _, call in calls:
            call(value)

    def drop(self, request: str) -> None:
        """Forget what observes for ``request``."""
        for location, calls in list(self.at.items()):
            left = [one for one in calls if one[0].request != request]
            if left:
                self.at[location] = left
            else:
                del self.at[location]
