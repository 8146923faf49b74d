"""The names that a block sees from around it."""

from __future__ import annotations

import builtins
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from nnsight_pp.core.block import Scope
from nnsight_pp.errors import explain
from nnsight_pp.trace.deliver import local_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

    from nnsight_pp.core.block import Block


_new_tuple = tuple.__new__  # a named tuple's own `__new__` takes three times as long


class Names(NamedTuple):
    """The frame around a block, innermost first.

    Attributes:
        around: Mappings (anything with `[name]`, and with an `in` that is true for all that it
            may have) in which a name is looked up, in order.
        is_block: Whether that frame is itself a running block, into which all names flow back.
    """

    around: tuple[Any, ...]
    is_block: bool = False

    def scope(self) -> Scope:
        """Return a fresh scope for one run of the block."""
        return Scope(*self.around)

    @property
    def siblings(self) -> SiblingNames | None:
        """The names that blocks beside it bind."""
        return next((one for one in self.around if isinstance(one, SiblingNames)), None)

    def beyond_siblings(self) -> Names:
        """Return what is around the block without what blocks beside it bind."""
        around = tuple(one for one in self.around if not isinstance(one, SiblingNames))
        return Names(around, self.is_block)

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
    outer = frame.f_globals
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        around = (*siblings, local_names(frame), outer)
        return _new_tuple(Names, (around, type(outer) is Scope))
    own = frame.f_locals
    if own is not outer:
        return Names((*siblings, {**_closed_over(frame), **own}, outer), isinstance(outer, Scope))
    if isinstance(outer, Scope):
        return _new_tuple(Names, ((*siblings, *outer.layers()), True))
    return Names((*siblings, outer))


def _closed_over(frame: FrameType) -> dict[str, Any]:
    """Return what a class body sees of the function around it; other frames show it themselves."""
    code, outer = frame.f_code, frame.f_back
    if code.co_flags & inspect.CO_OPTIMIZED or not code.co_freevars or outer is None:
        return {}
    found = {**_closed_over(outer), **outer.f_locals}
    return {name: found[name] for name in code.co_freevars if name in found}


@final
class CollectingScope(Scope):
    """The names of a trace's own body, which declares the invokes.

    Attributes:
        num_invokes: How many it has declared so far.
        bound_after: For each name that it has bound, how many it had declared by then.
    """

    __slots__ = ("bound_after", "num_invokes")

    def __init__(self, *around: Any) -> None:
        self.bound_after: dict[str, int] = {}
        self.num_invokes = 0
        super().__init__(*around)

    def __setitem__(self, name: str, value: Any) -> None:
        self.bound_after[name] = self.num_invokes
        super().__setitem__(name, value)


def bound_around(frame: FrameType) -> dict[str, int]:
    """Return `CollectingScope.bound_after` of now, where ``frame`` is that of a trace's body."""
    outer: Any = frame.f_globals
    is_body = type(outer) is CollectingScope and not frame.f_code.co_flags & inspect.CO_OPTIMIZED
    return dict(outer.bound_after) if is_body else {}


class Sibling(Protocol):
    """One invoke, as the others of its trace see it."""

    @property
    def block(self) -> Block:
        """Its text."""
        ...

    @property
    def scope(self) -> Scope:
        """What it has bound so far."""
        ...

    @property
    def frame(self) -> int:
        """The id of the frame in which it is written."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it has run to its end."""
        ...


@final
class BoundNames:
    """The names that the invokes of one frame may bind.

    Attributes:
        names: Those that the texts of their blocks show.
        are_more: Whether a block may bind others.
    """

    __slots__ = ("_last", "are_more", "names")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.are_more = False
        self._last: Block | None = None

    def add(self, block: Block) -> None:
        """Take in what ``block`` may bind."""
        if block is not self._last:  # in a loop it is the same one
            self._last = block
            self.names |= block.binds()
            self.are_more = self.are_more or block.binds_more()


@final
class SiblingNames:
    """The names that the other invokes of one trace have bound so far, if written in one frame.

    An earlier invoke's name comes first, as in code that runs from top to bottom. A name that an
    earlier one may still bind is not taken from around the trace: that would be a value that the
    last run left there. What the trace's own body binds, such as the variable of a loop around the
    invokes, counts from that line on: not what an earlier invoke bound before it, nor what a later
    one binds.

    Args:
        siblings: All invokes of the trace, in order.
        position: Which of them looks names up.
        frame: The id of the frame in which it is written.
        bound: The names that any of them may bind. Default: it is looked up in each.
        around: For each name that the trace's body had bound by then, before which invoke.
    """

    __slots__ = ("_bound", "_frame", "_siblings", "around", "position")

    def __init__(
        self,
        siblings: Sequence[Sibling],
        position: int,
        frame: int,
        bound: BoundNames | None = None,
        around: Mapping[str, int] | None = None,
    ) -> None:
        self._siblings = siblings
        self._bound = bound
        self._frame = frame
        self.position = position
        self.around = around or {}

    def may_see(self, name: str, position: int) -> bool:
        """Tell whether ``name`` may be what the invoke at ``position`` binds."""
        return name not in self.around or self.around[name] <= position < self.position

    def __contains__(self, name: str) -> bool:
        """Tell whether one of them may have bound ``name``."""
        # Most names are none of theirs; else a trace would cost the square of its invokes.
        bound = self._bound
        return bound is None or name in bound.names or bound.are_more

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        first = self.around.get(name, 0)
        before = [one for one in self._siblings[first : self.position] if one.frame == self._frame]
        before.reverse()
        after = () if name in self.around else self._siblings[self.position + 1 :]
        for sibling in (*before, *(one for one in after if one.frame == self._frame)):
            try:
                return sibling.scope.own_name(name)
            except KeyError:
                continue
        if any(name in one.block.binds() and not one.is_over for one in before):
            raise NameError(
                explain(
                    f"{name!r} is bound by an earlier invoke, which has not come that far.",
                    why="The blocks of a trace run side by side, each up to its next value.",
                    todo="First read a value that the model computes later, or use another name.",
                )
            )
        raise KeyError(name)
