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
    from collections.abc import Callable
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
        store: Stores it.
        second: What `as` binds beside the tracer: the copy of the model that it is stored on. None
            binds the tracer alone.
    """

    __slots__ = ("_second", "_store")

    def __init__(self, store: Callable[[Edit], None], second: Any) -> None:
        super().__init__()
        self._store: Callable[[Edit], None] | None = store
        self._second = second

    def _entered(self) -> Any:
        return self if self._second is None else (self, self._second)

    def _take(self, block: Block, frame: FrameType) -> None:
        seen = names_of(frame).look_up(block.needs())
        assert self._store is not None
        self._store(Edit(block, Names((seen, frame.f_globals))))

    def _forget(self) -> None:
        self._store = None
        self._second = None
