"""`with model.session():` - several traces as one.

The body is run where it stands, as plain code: what a trace in it binds is there for the next one
without being saved, and only what is saved leaves the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

from nnsight_pp.core.saved import SavedSet, active_saves
from nnsight_pp.trace.deliver import deliver
from nnsight_pp.trace.names import names_of
from nnsight_pp.trace.statement import BlockStatement

if TYPE_CHECKING:
    from types import FrameType

    from nnsight_pp.core.block import Block


class Values(Protocol):
    """The values that an engine keeps for a session."""

    def begin(self) -> None:
        """Begin to keep what traces bind."""
        ...

    def end(self) -> None:
        """Forget it."""
        ...

    def whole(self, value: Any) -> Any:
        """Return a saved value as it outlives the session."""
        ...


@final
class Session(BlockStatement):
    """A captured body that runs beside no model.

    Args:
        values: What an engine keeps for it. Default: the traces' values are objects of this
            process.
    """

    __slots__ = ("_values",)

    runs_at_once = True

    def __init__(self, values: Values | None = None) -> None:
        super().__init__()
        self._values = values

    def _take(self, block: Block, frame: FrameType) -> None:
        names = names_of(frame)
        scope = names.scope()
        around = active_saves.get()
        saves = SavedSet() if around is None else around
        token = active_saves.set(saves)
        values, binds = self._values, block.binds()
        if values is not None:
            values.begin()
        try:
            exec(block.code(), scope)
            found = {
                name: value
                for name, value in scope.own().items()
                if name in binds and (names.is_block or value in saves)
            }
            if values is not None and not names.is_block:
                found = {name: values.whole(value) for name, value in found.items()}
        finally:
            active_saves.reset(token)
            if values is not None:
                values.end()
        deliver(frame, found)
