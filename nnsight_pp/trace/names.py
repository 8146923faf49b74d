"""The names that a block sees from around it."""

from __future__ import annotations

import builtins
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
            except KeyError:
                continue
            if getattr(builtins, name, scope) is not value:
                found[name] = value
        return found


def names_of(frame: FrameType, shared: Any = None) -> Names:
    """Return the names of ``frame``; ``shared`` are those that blocks beside this one bind.

    A name of the frame itself wins over a shared one, and a shared one over a global one.
    """
    siblings = () if shared is None else (shared,)
    is_block = isinstance(frame.f_globals, Scope)
    if frame.f_locals is frame.f_globals:
        if is_block:
            own = frame.f_globals
            assert isinstance(own, Scope)
            return Names((*own.layers()[:-1], *siblings, own.layers()[-1]), is_block=True)
        return Names((*siblings, frame.f_globals))
    return Names((dict(frame.f_locals), *siblings, frame.f_globals), is_block=is_block)
