from __future__ import annotations

from typing import Any

import torch

from nnsight_pp.core.location import Location, Visit
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.parallel.pulled import OwnConstant
from nnsight_pp.parallel.split_weight import SplitWeight

WHERE = Location("model.embed", "weight")


class Elsewhere:
    """A part that another stage has."""

    is_here = False
    sums_alike = True
    visit = Visit(WHERE, 0)

    def __init__(self) -> None:
        self.num_pulls = 0

    def pull(self, picks: Any = (), *, in_torch: bool = False) -> torch.Tensor:
        self.num_pulls += 1
        return torch.arange(4.0)

    def echo(self, error: Exception) -> None:
        raise error


def doubled(part: torch.Tensor) -> torch.Tensor:
    return torch.cat([part, part + 10])


def test_the_stage_that_has_a_part_joins_it_at_once():
    joined: list[torch.Tensor] = []

    def whole(part: torch.Tensor) -> torch.Tensor:
        joined.append(part)
        return doubled(part)

    weight = LazyRemoteTensor(SplitWeight(OwnConstant(WHERE, torch.arange(4.0)), whole))
    assert len(joined) == 1
    assert weight.shape == (8,)
    assert float(weight[5]) == 11
    assert len(joined) == 1


def test_another_stage_pulls_its_part_once_when_it_is_used():
    part = Elsewhere()
    weight = LazyRemoteTensor(SplitWeight(part, doubled))
    assert part.num_pulls == 0
    assert float(weight[5] - weight[1]) == 10
    assert torch.equal(torch.ones(8) + weight, 1 + doubled(torch.arange(4.0)))
    assert part.num_pulls == 1
