"""One value in one worker's hands: served, perhaps edited, and handed back to the model.

An `OpenVisit` lives from the moment a location is reached until its worker asks for something
else, parks or ends. Edits made in that window reach the model; later ones do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from nnsight_pp.core.protocols import Cut


@final
class OpenVisit:
    """A worker's window on one value.

    Args:
        live: The value as the model computed it.
        cut: How this request sees it.
    """

    __slots__ = ("_cut", "_is_assigned", "_is_given", "_marks", "_served", "live")

    def __init__(self, live: Any, cut: Cut) -> None:
        self.live = live
        self._cut = cut
        self._served: Any = None
        self._marks: Any = None
        self._is_given = False
        self._is_assigned = False

    def give(self) -> Any:
        """Return the request's share of the value; the same object each time."""
        if not self._is_given:
            self._served = self._cut.give(self.live)
            self._marks = self._cut.marks(self._served)
            self._is_given = True
        return self._served

    def assign(self, value: Any) -> None:
        """Replace the value by ``value``.

        Raises:
            RowsError: It does not fit this request's rows. Nothing was changed.
        """
        self._cut.check(self.live, value)
        self._served = value
        self._is_given = self._is_assigned = True

    def commit(self) -> None:
        """Put the worker's edits into `live`."""
        if self._is_given:
            self.live = self._cut.put(
                self.live, self._served, self._marks, assigned=self._is_assigned
            )
            self._is_given = self._is_assigned = False
