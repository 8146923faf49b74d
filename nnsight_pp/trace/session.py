"""`with model.session():` - several traces as one.

The body is run where it stands, as plain code: what a trace in it binds is there for the next one
without being saved, and only what is saved leaves the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from nnsight_pp.core.saved import SavedSet, active_saves
from nnsight_pp.trace.deliver import deliver
from nnsight_pp.trace.names import names_of
from nnsight_pp.trace.statement import BlockStatement

if TYPE_CHECKING:
    from types import FrameType

    from nnsight_pp.core.block import Block


@final
class Session(BlockStatement):
    """A captured body that runs beside no model."""

    __slots__ = ()

    runs_at_once = True

    def _take(self, block: Block, frame: FrameType) -> None:
        names = names_of(frame)
        scope = names.scope()
        around = active_saves.get()
        saves = SavedSet() if around is None else around
        token = active_saves.set(saves)
        try:
            exec(block.code(), scope)
        finally:
            active_saves.reset(token)
        binds = block.binds()
        deliver(
            frame,
            {
                name: value
                for name, value in scope.own().items()
                if name in binds and (names.is_block or value in saves)
            },
        )
