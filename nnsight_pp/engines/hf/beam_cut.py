"""A prompt's rows where a generation computes several rows for each.

A beam search runs every row ``num_beams`` times, side by side, and returns some of them. So the
same run has values of the batch's own size, of the beams' and of the result's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.rows import BatchCut, Replacement, Rows, is_unreplaced, with_leaves_of
from nnsight_pp.core.tree import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable


@final
class BeamCut:
    """Views of a prompt's rows where the leading size is a known multiple of the batch's."""

    __slots__ = ("_by_size",)

    def __init__(self, rows: Rows, multiples: Iterable[int]) -> None:
        start, count, total = rows
        self._by_size = {
            total * one: BatchCut(Rows(start * one, count * one, total * one)) for one in multiples
        }

    def _cut(self, leaf: Any) -> BatchCut | None:
        return self._by_size.get(leaf.shape[0]) if _has_rows(leaf) else None

    def _with_rows_of(self, given: Any) -> BatchCut:
        counts = {leaf.shape[0] for leaf in leaves(given) if _has_rows(leaf)}
        fits = (cut for cut in self._by_size.values() if cut.rows.count in counts)
        return next(fits, self._any())

    def _any(self) -> BatchCut:
        return next(iter(self._by_size.values()))

    def give(self, value: Any) -> Any:
        """Return ``value`` with every batched tensor narrowed to this prompt's rows."""
        return map_leaves(value, self._give_leaf)

    def _give_leaf(self, leaf: Any) -> Any:
        cut = self._cut(leaf)
        return leaf if cut is None else cut.give(leaf)

    def marks(self, served: Any) -> list[Any]:
        """Return the leaves, so that a replaced one is seen by identity."""
        return self._any().marks(served)

    def check(self, value: Any, assigned: Any) -> None:
        """Raise `RowsError` where an assigned tensor has another number of rows."""
        if isinstance(value, Replacement):
            return
        live, new = list(leaves(value)), list(leaves(assigned))
        if len(live) != len(new):
            self._any().check(value, assigned)
        for old, leaf in zip(live, new, strict=True):
            cut = self._cut(old)
            if cut is not None:
                cut.check(old, leaf)

    def put(self, value: Any, served: Any, marks: list[Any], *, assigned: bool) -> Any:
        """Splice what was replaced into the batch; edits in place landed through the views."""
        if isinstance(value, Replacement):
            return self._with_rows_of(served).put(value, served, marks, assigned=True)
        if not assigned:
            if is_unreplaced(served, marks):
                return value
            self.check(value, served)
        return with_leaves_of(value, served, self._put_leaf)

    def _put_leaf(self, live: Any, new: Any) -> Any:
        cut = self._cut(live)
        return new if cut is None else cut.put(live, new, [], assigned=True)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
