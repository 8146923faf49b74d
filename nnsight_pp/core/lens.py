"""A value that stands inside another one: read out of it, and put back into it.

A *lens* knows how. An ask for such a value parks where the other one is served (its *place*), under
a location of its own, so it has its own number, its own answer for the other stages, and its own
edits. Which lenses there are is not known here: see `envoys.standard_lens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch

from nnsight_pp.core.counted import EditsCounted
from nnsight_pp.core.rows import TokenCut
from nnsight_pp.errors import RowsError, explain

if TYPE_CHECKING:
    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut


class Lens(Protocol):
    """Reads a tensor out of one request's share of a value, and puts it back."""

    def read(self, share: Any, cut: Cut) -> torch.Tensor:
        """Return the tensor: a fresh one, that the block may edit."""
        ...

    def write(self, share: Any, tensor: torch.Tensor, cut: Cut) -> Any:
        """Return ``share`` with ``tensor`` in it. ``share`` itself stays as it is."""
        ...


class Seen(NamedTuple):
    """Where a value with a lens is served, and the lens."""

    place: Location
    lens: Lens


@final
class LensCut:
    """A cut of one visit, looked at through a lens.

    Args:
        cut: How the request sees the value that is served at the place.
        lens: How the block sees that.
    """

    __slots__ = ("_cut", "_is_given", "_lens", "_marks", "_share")

    def __init__(self, cut: Cut, lens: Lens) -> None:
        self._cut = cut
        self._lens = lens
        self._share: Any = None
        self._marks: Any = None
        self._is_given = False

    def _share_of(self, value: Any) -> Any:
        if not self._is_given:
            self._share = self._cut.give(value)
            self._marks = self._cut.marks(self._share)
            self._is_given = True
        return self._share

    def give(self, value: Any) -> torch.Tensor:
        """Return what the lens shows of the request's share of ``value``."""
        cut = self._cut
        with EditsCounted():
            # A lens gives a fresh tensor, so what it is read from need not be a copy.
            share = cut.look(value) if type(cut) is TokenCut else self._share_of(value)
            return self._lens.read(share, cut)

    def marks(self, served: torch.Tensor) -> int:
        """Return what tells an edited tensor from an untouched one."""
        return served._version

    def check(self, value: Any, assigned: Any) -> None:
        """Raise `RowsError` where ``assigned`` is no tensor of the shape that a read gives."""
        wanted = list(self.give(value).shape)
        found = list(assigned.shape) if isinstance(assigned, torch.Tensor) else None
        if found != wanted:
            what = f"a {type(assigned).__name__}" if found is None else f"shape {found}"
            raise RowsError(
                explain(
                    f"{what[:1].upper()}{what[1:]} was assigned, and this request has {wanted}.",
                    why="A standard value is replaced by a tensor of the same shape.",
                    todo="Assign a tensor of the shape that a read gives.",
                )
            )

    def put(self, value: Any, served: torch.Tensor, marks: int | None, *, assigned: bool) -> Any:
        """Return what the model goes on with: ``served`` is in it where it was edited.

        A tensor in a graph is put back in any case, so that gradients flow through it.
        """
        if not assigned and served._version == marks and not served.requires_grad:
            return value
        share = self._share_of(value)
        with EditsCounted():
            new = self._lens.write(share, served, self._cut)
        # Without marks the cut cannot tell what was replaced, so it is told.
        return self._cut.put(value, new, self._marks, assigned=self._marks is None)


def through(seen: Seen | None, cut: Cut) -> Cut:
    """Return how a value is cut for a block that asked for what ``seen`` says, or for all of it."""
    return cut if seen is None else LensCut(cut, seen.lens)
