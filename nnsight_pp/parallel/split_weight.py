"""A weight of which each tensor-parallel rank holds a part, as a block gets it: whole.

A rank joins it with the others of its own stage: on the stage that has it at once, on another one
when a line forces it, from the parts that each rank pulls of its own column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.parallel.pulled import pick

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from nnsight_pp.core.location import Visit
    from nnsight_pp.parallel.pulled import Source


@final
class SplitWeight:
    """The source of the whole of a split weight.

    Args:
        part: The source of this rank's part, or of its column's.
        whole: Returns the whole of such a part. A collective: every rank forces it at one line.
    """

    __slots__ = ("_part", "_value", "_whole")

    sums_alike = True
    casts_copy = False

    def __init__(self, part: Source, whole: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._part = part
        self._whole = whole
        self._value: torch.Tensor | None = None
        if part.is_here:
            # What this rank ships is whole when the block is over, where no line can join it.
            self._value = whole(part.pull())

    @property
    def is_here(self) -> bool:
        """Whether this rank has a part of it, and ships it."""
        return self._part.is_here

    @property
    def shard(self) -> Source | None:
        """This rank's part, or its column's."""
        return self._part

    @property
    def visit(self) -> Visit:
        """What was asked for."""
        return self._part.visit

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """Return the weight with ``picks`` applied. It is never edited: trees copy it first."""
        if self._value is None:
            self._value = self._whole(self._part.pull(in_torch=in_torch))
        return pick(self._value, picks)

    def echo(self, error: Exception) -> None:
        """Note an error of a deferred index or edit, as the part's source does."""
        self._part.echo(error)
