"""Reductions that the owner makes, and errors that are not deferred."""

import contextlib
import threading
from typing import Any

import pytest
import torch

from fakes.sources import FakeSource, lazy
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.parallel.reductions import Reduction


def grid() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(4, 3).sin()


def is_lazy(value: Any) -> bool:
    return issubclass(type(value), LazyRemoteTensor)


CALLS = [
    lambda x: x.sum(),
    lambda x: x.norm(dim=-1),
    lambda x: x[1].mean(),
    lambda x: x[:, 1:].amax(0),
    lambda x: torch.argmax(x, dim=-1),
    lambda x: torch.sum(x, (0, 1)),
    lambda x: x.var(0, keepdim=True),
    lambda x: x[-1].to(torch.bfloat16),
    lambda x: x.half(),
    lambda x: (x[0].any(), x[0].all())[1],
    lambda x: x.sum(0, dtype=torch.float64),
    lambda x: torch.norm(x, dim=-1),
    lambda x: torch.std(x, dim=0, keepdim=True),
]


@pytest.mark.parametrize("call", CALLS)
def test_owner_makes_a_reduction_when_its_result_is_used(call: Any):
    x, source = lazy(grid())
    made = call(x)
    assert is_lazy(made)
    assert source.pulls == []
    wanted = call(grid())
    assert made.dtype == wanted.dtype
    assert torch.equal(made + 0, wanted + 0)
    assert len(source.pulls) == 1
    assert type(source.pulls[0][-1]) is Reduction


def test_the_parts_of_a_pair_are_taken_from_what_the_owner_made():
    x, source = lazy(grid())
    values, indices = x.topk(2, dim=-1)
    best = torch.max(x, dim=0)
    assert torch.equal(values, grid().topk(2, dim=-1).values)
    assert torch.equal(indices, grid().topk(2, dim=-1).indices)
    assert torch.equal(best.values, grid().max(dim=0).values)
    assert torch.equal(best[1], grid().max(dim=0).indices)
    assert all(any(type(step) is Reduction for step in picks) for picks in source.pulls)


def test_a_result_is_a_value_of_its_own():
    x, source = lazy(grid())
    made = x.sum(0)
    kept = made.clone()
    made[0] = 5.0
    x[:] = 0.0
    assert made.tolist() == [5.0, *grid().sum(0)[1:].tolist()]
    assert kept.tolist() == grid().sum(0).tolist()
    assert x.sum().item() == 0.0
    assert () in source.pulls


def test_an_edited_value_is_brought_and_reduced_here():
    x, source = lazy(grid())
    x[0] = 1.0
    assert x.sum(-1)[0].item() == 3.0
    assert source.pulls == [()]


def test_what_is_here_already_is_reduced_here():
    x, source = lazy(grid())
    row = x[1] * 1
    assert torch.equal(x[1].sum(), row.sum())
    assert source.pulls == [(1,)]


def test_a_reduction_by_another_value_is_made_here():
    x, source = lazy(grid())
    made = torch.max(x, torch.zeros(4, 3))
    assert not is_lazy(made)
    assert source.pulls == [()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cast_that_shrinks_nothing_is_made_here(dtype: torch.dtype):
    x, source = lazy(grid())
    assert not is_lazy(x.to(dtype))
    assert source.pulls == [()]


@pytest.mark.parametrize("cast", [lambda x: x.bfloat16(), lambda x: x.to(torch.bfloat16)])
def test_a_cast_that_gives_the_value_itself_shares_its_edits(
    cast: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeSource, "casts_copy", False)
    for value in (lazy(grid().bfloat16())[0], grid().bfloat16()):
        same = cast(value)
        same[0] = 7.0
        value[1] = 8.0
        assert (value[0].tolist(), same[1].tolist()) == ([7.0] * 3, [8.0] * 3)


def test_a_cast_of_what_the_owner_made_is_made_here():
    x, _ = lazy(grid())
    made = x.sum(0, dtype=torch.bfloat16)
    same = made.bfloat16()
    same[0] = 7.0
    assert made[0].item() == 7.0


def test_sums_are_made_here_where_the_owner_would_compute_them_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(FakeSource, "sums_alike", False)
    x, source = lazy(grid())
    assert torch.equal(x.sum(), grid().sum())
    assert source.pulls == [()]
    y, source = lazy(grid())
    best = y.argmax()
    assert torch.equal(best + 0, grid().argmax())
    assert source.pulls == [(Reduction("argmax", (), ()),)]


def test_a_reduction_under_autocast_is_made_here():
    value = grid().bfloat16()
    x, source = lazy(value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = value.prod(), torch.prod(value, 0)
        found = x.prod(), torch.prod(x, 0)
    assert [one.dtype for one in wanted] == [torch.float32] * 2
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert source.pulls == [()]


def test_looking_a_method_up_answers_for_the_real_value():
    x, source = lazy((grid(), grid()))
    assert not hasattr(x, "mean")
    assert source.pulls == [()]


def test_printed_form_is_the_call():
    x, source = lazy(grid())
    made = x[0].sum(-1, keepdim=True)
    source.is_over = True
    assert repr(made) == "<LazyRemoteTensor model.layers.5.output#2[0].sum(-1, keepdim=True)>"


# ------------------------------------------------------------------ errors under a `try`


def under_try(x: Any) -> str:
    try:
        x[99]
    except IndexError:
        return "handled"
    return "not seen"


def under_finally(x: Any) -> str:
    seen = "not seen"
    try:
        x[0, 0].sum(7)
        seen = "passed"
    except IndexError:
        seen = "handled"
    finally:
        seen += "!"
    return seen


def in_a_function_called_under_try(x: Any) -> str:
    def inner() -> None:
        x[99] = 1.0

    try:
        inner()
    except IndexError:
        return "handled"
    return "not seen"


def under_suppress(x: Any) -> str:
    seen = "handled"
    with contextlib.suppress(IndexError):
        x[99].zero_()
        seen = "not seen"
    return seen


def under_two(x: Any) -> str:
    try:
        with torch.no_grad():
            x[99]
    except IndexError:
        return "handled"
    return "not seen"


def in_a_handler(x: Any) -> str:
    try:
        try:
            raise ValueError
        except ValueError:
            x[99]
    except IndexError:
        return "handled"
    return "not seen"


@pytest.mark.parametrize(
    "block",
    [
        under_try,
        under_finally,
        in_a_function_called_under_try,
        under_suppress,
        under_two,
        in_a_handler,
    ],
)
def test_error_that_the_block_handles_is_raised_at_its_line(block: Any):
    x, source = lazy(grid())
    assert block(x) == block(grid())
    assert source.echoes == []


def test_a_context_that_lets_errors_pass_defers():
    x, source = lazy(grid())
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        row = x[0]
    with torch.inference_mode():
        x[1] = 0.0
    assert source.pulls == []
    with threading.Lock():  # what it does with an error is not known
        _ = x[2]
    assert len(source.pulls) == 1
    assert is_lazy(row)


def test_lines_behind_a_try_defer():
    x, source = lazy(grid())
    try:
        found = int("7")
    except ValueError:
        found = 0
    x[found - 7] += 1
    _ = [x[index] for index in range(3)]
    assert source.pulls == []
