"""The names that a block sees from around it."""

from __future__ import annotations

import builtins
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.block import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType


@dataclass(frozen=True, slots=True)
class Names:
    """The frame around a block, innermost first.

    Attributes:
        around: Mappings (anything with `[name]`) in which a name is looked up, in order.
        is_block: Whether that frame is itself a running block, into which all names flow back.
    """

    around: tuple[Any, ...]
    is_block: bool = False

    def scope(self) -> Scope:
        """Return a fresh scope for one run of the block."""
        return Scope(*self.around)

    def look_up(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the objects of those ``names`` that exist; builtins are left out."""
        scope = self.scope()
        found = {}
        for name in names:
            try:
                value = scope[name]
            except (KeyError, NameError):
                continue
            if getattr(builtins, name, scope) is not value:
                found[name] = value
        return found


def names_of(frame: FrameType, shared: Any = None) -> Names:
    """Return the names of ``frame``; ``shared`` are those that blocks beside this one bind.

    A shared name wins over one of the frame, as the later of two assignments does: a loop, or a
    cell that is run again, would else find the value that the last run left there.
    """
    siblings = () if shared is None else (shared,)
    is_block = isinstance(frame.f_globals, Scope)
    if frame.f_locals is not frame.f_globals:
        own = {**_closed_over(frame), **frame.f_locals}
        return Names((*siblings, own, frame.f_globals), is_block=is_block)
    if isinstance(frame.f_globals, Scope):
        return Names((*siblings, *frame.f_globals.layers()), is_block=True)
    return Names((*siblings, frame.f_globals))


def _closed_over(frame: FrameType) -> dict[str, Any]:
    """Return what a class body sees of the function around it; other frames show it themselves."""
    code, outer = frame.f_code, frame.f_back
    if code.co_flags & inspect.CO_OPTIMIZED or not code.co_freevars or outer is None:
        return {}
    found = {**_closed_over(outer), **outer.f_locals}
    return {name: found[name] for name in code.co_freevars if name in found}
