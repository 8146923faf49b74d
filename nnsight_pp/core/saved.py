"""Which objects of a block leave it.

`save(x)` marks an object by identity, in the trace that is active where the call runs. At the end
of the trace only names bound to a marked object are written into the caller's frame.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from nnsight_pp.errors import SaveOutsideTraceError, explain

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


class SavedSet:
    """The marked objects of one trace, or of one worker on one rank.

    Invariant: every marked object is kept alive, so that its id stays its own.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def mark(self, value: Any) -> None:
        """Mark ``value`` to be returned."""
        self._kept[id(value)] = value

    def marked_of(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``names`` that are bound to marked objects."""
        kept = self._kept
        return {name: value for name, value in names.items() if id(value) in kept}

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._kept

    def __len__(self) -> int:
        return len(self._kept)


active_saves: ContextVar[SavedSet | None] = ContextVar("nnsight_pp_saves", default=None)


def save(value: T) -> T:
    """Mark ``value`` to be returned from the outermost trace, and return it unchanged.

    Raises:
        SaveOutsideTraceError: No trace is active here.
    """
    saves = active_saves.get()
    if saves is None:
        raise SaveOutsideTraceError(
            explain(
                "`save` was called outside a trace.",
                why="Only what a block holds can be returned from it.",
                todo="Call it inside a `with model.trace(...):` block.",
            )
        )
    saves._kept[id(value)] = value
    return value
