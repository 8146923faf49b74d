"""`model.edit()`: a block that is stored, and run first in every later run.

The names that it reads are looked up when it is stored. Each run gives it a scope of its own, so
nothing that it binds stays; the objects that it holds on to are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.saved import SavedSet
from nnsight_pp.trace.names import Names, names_of
from nnsight_pp.trace.statement import BlockStatement
from nnsight_pp.trace.tracer import BlockTracer, Invocation

if TYPE_CHECKING:
    from types import FrameType

    from nnsight_pp.core.block import Block


@dataclass(frozen=True, slots=True)
class Edit:
    """One stored block, and the names that it saw."""

    block: Block
    names: Names

    def invocation(self) -> Invocation:
        """Return the block as one more of a run. What it saves is returned to nobody."""
        return Invocation((), {}, self.block, self.names, SavedSet())


@final
class EditTracer(BlockStatement, BlockTracer):
    """`with model.edit() as (tracer, edited):` stores its body.

    Args:
        edits: Where it is stored.
        edited: The copy of the model that it is stored on, or None when it is stored in place.
    """

    __slots__ = ("_edited", "_edits")

    def __init__(self, edits: list[Edit], edited: Any) -> None:
        super().__init__()
        self._edits = edits
        self._edited = edited

    def _entered(self) -> Any:
        return self if self._edited is None else (self, self._edited)

    def _take(self, block: Block, frame: FrameType) -> None:
        seen = names_of(frame).look_up(block.reads())
        self._edits.append(Edit(block, Names((seen, frame.f_globals))))

    def _forget(self) -> None:
        self._edits = []
        self._edited = None
