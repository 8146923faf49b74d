from __future__ import annotations

import pytest
import torch

from nnsight_pp.parallel.parts import (
    ColumnGroup,
    Columns,
    PartShapeError,
    columns_of,
    join,
    share,
    split_evenly,
    summand,
)

# What a fused layer of 4 heads and 2 key/value heads of size 3 holds.
QKV = (ColumnGroup(12), ColumnGroup(6), ColumnGroup(6))
# The same on four ranks: each key/value head is held by two of them.
REPLICATED = (ColumnGroup(12), ColumnGroup(6, 2), ColumnGroup(6, 2))


def whole(columns: int, tokens: int = 5) -> torch.Tensor:
    return torch.arange(tokens * columns, dtype=torch.float32).view(tokens, columns)


def parts(rule: Columns, value: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
    return [share(rule, value, rank, num_ranks) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("groups", "num_ranks"),
    [
        ((ColumnGroup(24),), 2),
        ((ColumnGroup(12), ColumnGroup(12)), 3),
        (QKV, 2),
        (REPLICATED, 4),
        ((ColumnGroup(24, 2),), 4),
        ((ColumnGroup(6), ColumnGroup(18)), 6),
    ],
)
def test_joined_shares_are_the_whole(groups: tuple[ColumnGroup, ...], num_ranks: int):
    rule = Columns(groups)
    value = whole(24)
    assert torch.equal(join(rule, parts(rule, value, num_ranks)), value)


def test_fused_columns_are_in_the_order_of_the_unsplit_layer():
    query, key, values = torch.ones(2, 12), torch.full((2, 6), 2.0), torch.full((2, 6), 3.0)
    # What each of two ranks computes: its own half of each, side by side.
    held = [torch.cat([query[:, :6], key[:, :3], values[:, :3]], 1) for _ in range(2)]
    assert torch.equal(join(Columns(QKV), held), torch.cat([query, key, values], 1))


def test_a_replicated_head_comes_once_and_goes_to_each_rank_that_holds_it():
    rule = Columns(REPLICATED)
    value = whole(24)
    held = parts(rule, value, 4)
    assert [part.shape[1] for part in held] == [9, 9, 9, 9]
    assert torch.equal(held[0][:, 3:], held[1][:, 3:])
    assert not torch.equal(held[1][:, 3:], held[2][:, 3:])
    assert torch.equal(held[3][:, 3:6], value[:, 15:18])
    assert torch.equal(join(rule, held), value)


def test_values_with_an_axis_of_heads_are_split_along_it():
    rule = Columns(REPLICATED)
    value = whole(24).view(5, 8, 3)
    held = parts(rule, value, 4)
    assert [list(part.shape) for part in held] == [[5, 3, 3]] * 4
    assert torch.equal(join(rule, held), value)


def test_weights_are_split_along_their_own_axis():
    value = whole(6, tokens=8)
    rows = split_evenly(8, axis=0)
    assert torch.equal(share(rows, value, 1, 2), value[4:])
    assert torch.equal(join(rows, [value[:4], value[4:]]), value)
    bias = torch.arange(24.0)
    rule = Columns(QKV, axis=0)
    assert torch.equal(join(rule, parts(rule, bias, 2)), bias)


@pytest.mark.parametrize("shape", [(5, 11), (5,), (5, 5, 3), (5, 0)])
def test_a_part_of_another_shape_is_refused(shape: tuple[int, ...]):
    with pytest.raises(PartShapeError, match="does not hold 12 columns"):
        join(Columns(QKV), [torch.zeros(shape)] * 2)


def test_a_whole_of_another_width_is_refused():
    with pytest.raises(PartShapeError, match="does not hold 24 columns"):
        share(Columns(QKV), whole(12), 0, 2)


def test_a_changed_row_of_a_sum_counts_once():
    summands = [torch.randn(4, 3), torch.randn(4, 3)]
    before = summands[0] + summands[1]
    after = before.clone()
    after[2] = torch.tensor([1.0, 2.0, 3.0])
    fresh = [summand(part, before, after, is_first=rank == 0) for rank, part in enumerate(summands)]
    assert torch.equal(fresh[0] + fresh[1], after)
    for part, old in zip(fresh, summands, strict=True):
        assert torch.equal(part[[0, 1, 3]], old[[0, 1, 3]])


@pytest.mark.parametrize(
    ("start", "stop", "groups"),
    [
        (0, 12, QKV),
        (0, 6, QKV[:1]),
        (6, 9, QKV[1:2]),
        (6, 12, QKV[1:]),
        (0, 5, None),
        (5, 9, None),
        (6, 8, None),
        (12, 15, None),
    ],
)
def test_part_of_a_part_is_told_by_whole_shares(
    start: int, stop: int, groups: tuple[ColumnGroup, ...] | None
):
    found = columns_of(Columns(QKV), start, stop, 2)
    assert (None if found is None else found.groups) == groups
