"""Where a rank stands: its pipeline stage and its place in the group that splits one layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """The coordinates of one rank.

    >>> print(Place(stage=1, num_stages=2))
    stage 1 of 2 | tp rank 0 of 1
    """

    stage: int = 0
    num_stages: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def is_lead(self) -> bool:
        """Whether this rank reports for its stage."""
        return self.tp_rank == 0

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.num_stages} | tp rank {self.tp_rank} of {self.tp_size}"
