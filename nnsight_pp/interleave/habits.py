"""What a worker brings of a location each time that it names it.

Note [Asked ahead]
    A loop that has brought a value of an earlier stage in one step will bring it in the next. So
    the question goes out as soon as the block names the value again, and the answer comes while
    the model computes: the line that needs it finds it here. What a block has not brought the last
    time that it named it is not asked for, nor what it brings in another part each time. Nothing
    depends on it but time: an answer that nobody needs is dropped, whatever it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.location import Location


@final
class Habits:
    """The habits of one worker. A part is known by the printed form of its picks."""

    __slots__ = ("_irregular", "_parts")

    def __init__(self) -> None:
        # What was brought of each location since it was last named.
        self._parts: dict[Location, dict[str, Sequence[Any]]] = {}
        self._irregular: set[Location] = set()

    def take(self, location: Location) -> dict[str, Sequence[Any]]:
        """Return which parts of ``location``, named now, the worker will need, as far as known."""
        return self._parts.pop(location, {})

    def note(self, location: Location, part: str, picks: Sequence[Any]) -> None:
        """Note that the worker brings this part."""
        if location not in self._irregular:
            self._parts.setdefault(location, {})[part] = picks

    def break_off(self, location: Location) -> None:
        """Note that what was asked for ahead is not what the worker brings."""
        self._irregular.add(location)
        self._parts.pop(location, None)
