"""The pieces of a value on the ranks of a tensor-parallel group, and the value itself.

A *rule* says what a rank holds of one tensor: a share of its columns (`Columns`), or a summand of
it (`Summand`). `join` makes the whole of the parts of all ranks; `share` and `summand` make this
rank's part of a whole. Nothing here moves data: the parts come in as a list, by rank.

A fused layer holds several *groups* of columns side by side, and each rank a share of each, so its
parts stand in rank order: ``[q0 k0 v0]``, ``[q1 k1 v1]``. The whole is in the order of the layer
that is not split: ``[q0 q1 k0 k1 v0 v1]``. Key and value heads that are fewer than the ranks are
held by several ranks alike; the whole has each of them once.

Letters: T tokens, C columns of the whole, P columns of a part, H heads, S their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class ColumnGroup(NamedTuple):
    """Columns that are split by themselves.

    Attributes:
        size: How many there are in the whole.
        replicas: How many neighbouring ranks hold the same share of them.
    """

    size: int
    replicas: int = 1

    def share_of(self, num_ranks: int) -> int:
        """Return how many of them one rank holds."""
        return self.size * self.replicas // num_ranks


@dataclass(frozen=True, slots=True)
class Columns:
    """A rank holds a share of each group of columns, its shares side by side.

    Attributes:
        groups: In the order of the layer that is not split.
        axis: The axis of the columns: 1 in values ``[T, P]`` and ``[T, H, S]``, where it is the
            heads; 0 or 1 in weights.
    """

    groups: tuple[ColumnGroup, ...]
    axis: int = 1

    def sizes_in(self, part_TP: torch.Tensor, num_ranks: int) -> list[int]:
        """Return the extent of each group along the axis of one rank's part.

        Raises:
            PartShapeError: The part does not have the shares that this rule says.
        """
        shares = [group.share_of(num_ranks) for group in self.groups]
        return _extents(part_TP, self.axis, shares)


@dataclass(frozen=True, slots=True)
class Summand:
    """A rank holds one summand of the value, of the value's own shape."""


Rule = Columns | Summand


class PartShapeError(ValueError):
    """A part does not have the shape that its rule says."""


def split_evenly(size: int, *, replicas: int = 1, axis: int = 1) -> Columns:
    """Return the rule of ``size`` columns in one group."""
    return Columns((ColumnGroup(size, replicas),), axis)


def join(rule: Columns, parts_TP: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the whole ``[T, C]`` of every rank's part ``[T, P]``, in new memory.

    >>> rule = Columns((ColumnGroup(4), ColumnGroup(2)))
    >>> join(rule, [torch.tensor([[1, 2, 5]]), torch.tensor([[3, 4, 6]])]).tolist()
    [[1, 2, 3, 4, 5, 6]]

    Raises:
        PartShapeError: A part does not have the shares that the rule says.
    """
    first = parts_TP[0]
    extents = rule.sizes_in(first, len(parts_TP))
    pieces = [
        part.split_with_sizes(
            extents if part.shape == first.shape else rule.sizes_in(part, len(parts_TP)), rule.axis
        )
        for part in parts_TP
    ]
    return torch.cat(
        [
            pieces[rank][place]
            for place, group in enumerate(rule.groups)
            for rank in range(0, len(parts_TP), group.replicas)
        ],
        dim=rule.axis,
    )


def share(rule: Columns, whole_TC: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Return the part ``[T, P]`` of ``rank``, in new memory.

    >>> rule = Columns((ColumnGroup(4), ColumnGroup(2)))
    >>> share(rule, torch.tensor([[1, 2, 3, 4, 5, 6]]), 1, 2).tolist()
    [[3, 4, 6]]

    Raises:
        PartShapeError: The whole does not have the columns that the rule says.
    """
    extents = _extents(whole_TC, rule.axis, [group.size for group in rule.groups])
    pieces = []
    for group, columns in zip(rule.groups, whole_TC.split(extents, rule.axis), strict=True):
        held = columns.shape[rule.axis] * group.replicas // num_ranks
        pieces.append(columns.narrow(rule.axis, rank // group.replicas * held, held))
    return torch.cat(pieces, dim=rule.axis)


def _extents(value_TC: torch.Tensor, axis: int, sizes: Sequence[int]) -> list[int]:
    """Return how much of ``axis`` each group of so many columns takes.

    Values with an axis of heads, ``[T, H, S]``, have fewer and thicker columns.
    """
    extent = value_TC.shape[axis] if value_TC.dim() > axis else 0
    thickness = sum(sizes) // extent if extent else 0
    fits = extent * thickness == sum(sizes) and all(one % thickness == 0 for one in sizes)
    if not fits or (thickness > 1 and value_TC.shape[axis + 1 :].numel() != thickness):
        raise PartShapeError(f"shape {list(value_TC.shape)} does not hold {sum(sizes)} columns")
    return [one // thickness for one in sizes]


def summand(
    part_TC: torch.Tensor, before_TC: torch.Tensor, after_TC: torch.Tensor, *, is_first: bool
) -> torch.Tensor:
    """Return this rank's summand of a sum whose rows were changed from ``before`` to ``after``.

    A changed row is held by the first rank alone, so that it counts once and exactly; the others
    hold zeros there. Rows that were not changed keep their summands.
    """
    changed = (before_TC != after_TC).flatten(1).any(1)
    fresh = part_TC.clone()
    fresh[changed] = after_TC[changed] if is_first else 0
    return fresh


def columns_of(rule: Columns, start: int, stop: int, num_ranks: int) -> Columns | None:
    """Return the rule of the columns ``start`` to ``stop`` of a part, or None.

    Only whole shares can be told: ``q`` of ``[q k v]``, but not half of it.

    >>> columns_of(Columns((ColumnGroup(4), ColumnGroup(2))), 2, 3, 2).groups
    (ColumnGroup(size=2, replicas=1),)
    """
    found = []
    at = 0
    for group in rule.groups:
        end = at + group.share_of(num_ranks)
        if start <= at and end <= stop:
            found.append(group)
        elif start < end and at < stop:
            return None
        at = end
    covered = sum(group.share_of(num_ranks) for group in found)
    return Columns(tuple(found), 1) if found and covered == stop - start else None
