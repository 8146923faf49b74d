from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_pp.core.location import Location, Visit
from nnsight_pp.errors import NotSupportedError
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.parallel.pulled import OwnConstant
from nnsight_pp.parallel.split_weight import SplitWeight

WHERE = Location("model.embed", "weight")


class Elsewhere:
    """A part that another stage has."""

    is_here = False
    sums_alike = casts_copy = True
    shard = None
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


def shared() -> Exception:
    return NotSupportedError("everybody uses it")


def local_of_a_whole_weight() -> LazyRemoteTensor:
    return LazyRemoteTensor(OwnConstant(WHERE, torch.arange(4.0)), shared)


def local_of_a_joined_one() -> LazyRemoteTensor:
    part = OwnConstant(WHERE, torch.arange(4.0))
    return LazyRemoteTensor(SplitWeight(part, doubled), shared)


def local_of_another_stage() -> LazyRemoteTensor:
    return LazyRemoteTensor(SplitWeight(Elsewhere(), doubled), shared)


@pytest.mark.parametrize("make", [local_of_a_whole_weight, local_of_a_joined_one])
def test_local_is_what_this_rank_holds(make: Callable[[], LazyRemoteTensor]):
    weight = make()
    assert weight.local.tolist() == [0, 1, 2, 3]
    assert weight.local.local[1:].tolist() == [1, 2, 3]
    with pytest.raises(AttributeError):
        weight[0].local


def test_a_value_that_is_no_weight_has_no_local():
    with pytest.raises(AttributeError):
        LazyRemoteTensor(OwnConstant(WHERE, torch.arange(4.0))).local


EDITS: dict[str, Callable[[Any], Any]] = {
    "an element": lambda weight: weight.__setitem__(0, 5),
    "a row": lambda weight: weight[1:].add_(1),
    "a part": lambda weight: weight.local.zero_(),
    "an operator": lambda weight: weight.__iadd__(1),
    "torch": lambda weight: torch.nn.init.zeros_(weight),
    "out": lambda weight: torch.ones(8, out=weight),
    "an attribute": lambda weight: setattr(weight, "data", torch.ones(8)),
}


@pytest.mark.parametrize("make", [local_of_a_joined_one, local_of_another_stage])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_what_others_use_is_refused(edit: str, make: Callable[[], LazyRemoteTensor]):
    weight = make()
    with pytest.raises(NotSupportedError, match="everybody uses it"):
        EDITS[edit](weight)
    assert torch.equal(torch.zeros(8) + weight, doubled(torch.arange(4.0)))


def test_an_edit_through_a_view_is_refused_by_torch():
    weight = local_of_another_stage()
    own = weight.clone()
    own.view(2, 4)[0] = 7
    own += 1
    assert (own[0].item(), weight[0].item()) == (8, 0)
    with pytest.raises(RuntimeError, match="make a clone"):
        weight.view(2, 4)[0] = 7
    assert not (weight * 2).is_inference()
