"""One value in one worker's hands: served, perhaps edited, and handed back to the model.

An `OpenVisit` lives from the moment a location is reached until its worker asks for something
else, parks or ends. Edits made in that window reach the model; later ones do not. A worker that
waits at a barrier keeps its visit as long as the model stands at the location: others may be handed
the value meanwhile, and all their edits land in the one `Handed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.raw_writes import RawWrites
from nnsight_pp.core.rows import Replacement
from nnsight_pp.core.tree import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.protocols import Cut
    from nnsight_pp.interleave.worker import Worker


class View(NamedTuple):
    """What a block was shown in place of a value, and how its edits go back into that."""

    name: object
    owner: object
    shown: Any
    # The version that ``shown`` had, or None where only the way back can tell.
    mark: int | None
    put_back: Callable[[Any], Any]


@final
class Handed:
    """The value at which the model stands, with the edits of all who were handed it.

    Attributes:
        value: What the model goes on with.
        visits: The windows on it of workers that share names, each with its worker.
        is_over: Whether the model has gone on.
    """

    __slots__ = ("is_over", "value", "visits")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.visits: list[tuple[Worker, OpenVisit]] = []
        self.is_over = False

    def leave(self) -> Any:
        """Note that the model goes on; return with what.

        What a block has handed to another one may have been edited there.
        """
        for worker, visit in self.visits:
            try:
                visit.commit_and_stay()
            except Exception as error:
                worker.alone(error)
        self.is_over = True
        return self.value


@final
class OpenVisit:
    """A worker's window on one value.

    Args:
        handed: The value at which the model stands.
        cut: How this request sees it.
        is_whole: Whether the worker was given the value itself.
        writes_raw: Whether it may edit values in a way that torch does not count.
    """

    __slots__ = (
        "_cut",
        "_is_assigned",
        "_is_given",
        "_marks",
        "_raw",
        "_served",
        "_views",
        "_watched",
        "handed",
    )

    def __init__(
        self, handed: Handed, cut: Cut, *, is_whole: bool = False, writes_raw: bool = False
    ) -> None:
        self.handed = handed
        self._raw = RawWrites() if writes_raw else None
        self._cut = cut
        self._served: Any = handed.value if is_whole else None
        self._marks: Any = None
        self._is_given = is_whole
        self._is_assigned = False
        self._views: list[View] | None = None
        self._watched: list[tuple[Any, int]] | None = None

    def give(self) -> Any:
        """Return the request's share of the value; the same object each time."""
        if not self._is_given:
            self._served = self._cut.give(self.handed.value)
            self._marks = self._cut.marks(self._served)
            self._is_given = True
            if self._raw is not None:
                self._raw.note(self._served)
        return self._served

    def assign(self, value: Any) -> None:
        """Replace the value by ``value``.

        Raises:
            RowsError: It does not fit this request's rows. Nothing was changed.
        """
        self._cut.check(self.handed.value, value)
        self._served = value
        self._is_given = self._is_assigned = True

    def watch(
        self,
        name: object,
        owner: object,
        shown: Any,
        mark: int | None,
        put_back: Callable[[Any], Any],
        *,
        writes_raw: bool = False,
    ) -> None:
        """Remember that the block was shown ``shown``: its edits go back when the visit is over.

        Args:
            name: Which view it is.
            owner: The node on which it was read.
            shown: What the block holds.
            mark: The version that it has now, where it counts its edits.
            put_back: Turns the value into one with the view's edits.
            writes_raw: Whether it may edit the view in a way that torch does not count.
        """
        self._views = [*(self._views or ()), View(name, owner, shown, mark, put_back)]
        if writes_raw:
            self._raw = self._raw or RawWrites()
            self._raw.note(shown)

    def view_of(self, name: object, owner: object) -> tuple[Any] | None:
        """Return what the block was shown as ``name``, in a tuple, or None."""
        for view in self._views or ():
            if view.name is name and view.owner is owner:
                return (view.shown,)
        return None

    @property
    def has_views(self) -> bool:
        """Whether the block holds views whose edits are still to go back."""
        return self._views is not None

    def settle(self) -> Any:
        """Put the edits of the block's views into the value, and return it."""
        if self._raw is not None:
            self._raw.count()
        views, self._views = self._views, None
        for view in views or ():
            if view.mark is None or view.shown._version != view.mark:
                self.assign(view.put_back(self.give()))
        return self.give()

    def commit(self) -> None:
        """Put the worker's edits into what the model goes on with."""
        if self._raw is not None:
            self._raw.count()
        if self._views is not None:
            self.settle()
        if self._is_given:
            self.handed.value = self._cut.put(
                self.handed.value, self._served, self._marks, assigned=self._is_assigned
            )
            self._is_given = self._is_assigned = False

    def commit_read(self) -> None:
        """Put the worker's edits into a value that others may edit yet; `Handed.leave` ends that.

        What was assigned is a value of the block's own, and is not looked at again.
        """
        if self._views is not None:
            self.settle()
        if self._is_assigned:
            self.commit()
        else:
            self.commit_and_stay()

    def commit_and_stay(self) -> None:
        """Put the worker's edits in; what is edited next is put in at the next commit."""
        if self._views is not None:
            self.settle()
        was_given = self._is_given
        self.commit()
        if was_given and not isinstance(self.handed.value, Replacement):
            self._marks = self._cut.marks(self._served)
            self._is_given = True
        self.watch_edits()

    def watch_edits(self) -> None:
        """Remember the value as it is now, after a `commit`."""
        self._watched = _versions(self._served)

    def was_edited_since(self) -> bool:
        """Whether the value was edited in place since `watch_edits`."""
        if self._raw is not None:
            self._raw.count()
        now, watched = _versions(self._served), self._watched or []
        return len(now) != len(watched) or any(
            leaf is not old or version != before
            for (leaf, version), (old, before) in zip(now, watched, strict=True)
        )


def _versions(value: Any) -> list[tuple[Any, int]]:
    """Return each leaf with the number of its edits, where it counts them."""
    return [
        (leaf, leaf._version)
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        else (leaf, 0)
        for leaf in leaves(value)
    ]
