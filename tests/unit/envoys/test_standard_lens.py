"""Standard values in what an engine's modules take and give: a request's rows of a flat batch."""

from __future__ import annotations

import pytest
import torch

from nnsight_pp.core.lens import LensCut
from nnsight_pp.core.rows import Rows, TokenCut, WholeCut
from nnsight_pp.envoys.standard_lens import Columns, First, Flat, Input, Pair, StandardLens
from nnsight_pp.errors import NotSupportedError, RowsError

ROWS = Rows(1, 3, 5)


def cut_of(pick, columns=None, *, is_last=False):
    return LensCut(TokenCut(ROWS), StandardLens(pick, Flat(), columns, is_last=is_last))


def edited(cut, value, edit):
    """Return what the model goes on with when a worker makes ``edit`` on what it is given."""
    served = cut.give(value)
    marks = cut.marks(served)
    edit(served)
    return cut.put(value, served, marks, assigned=False)


def pair():
    torch.manual_seed(0)
    return torch.randn(5, 4), torch.randn(5, 4)


def test_a_stream_in_two_parts_is_served_as_its_sum():
    hidden, residual = pair()
    assert torch.equal(cut_of(Pair()).give((hidden, residual)), (hidden + residual)[1:4])


def test_an_untouched_value_leaves_the_very_objects():
    value = pair()
    assert edited(cut_of(Pair()), value, lambda served: None) is value


def test_an_edited_stream_comes_out_exactly_and_other_tokens_keep_their_parts():
    hidden, residual = pair()
    before = hidden.clone(), residual.clone()
    new, rest = edited(cut_of(Pair()), (hidden, residual), lambda served: served[1].fill_(0.1))
    assert torch.equal((new + rest)[2], torch.full((4,), 0.1))
    for row in (0, 1, 3, 4):
        assert torch.equal(new[row], hidden[row])
        assert torch.equal(rest[row], residual[row])
    assert torch.equal(hidden, before[0]), "the model may hold the old tensor elsewhere"
    assert torch.equal(residual, before[1])


def test_an_assigned_stream_comes_out_exactly():
    value = pair()
    cut = cut_of(Pair())
    wanted = torch.randn(3, 4)
    cut.check(value, wanted)
    new, rest = cut.put(value, wanted, None, assigned=True)
    assert torch.equal((new + rest)[1:4], wanted)
    assert torch.equal((new + rest)[[0, 4]], (value[0] + value[1])[[0, 4]])


@pytest.mark.parametrize("wrong", [torch.zeros(3, 5), torch.zeros(5, 4), 0.0])
def test_a_value_that_does_not_fit_is_refused(wrong):
    with pytest.raises(RowsError, match=r"this request has \[3, 4\]"):
        cut_of(Pair()).check(pair(), wrong)


@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (1, 4), (5, 1)])
def test_parts_of_a_stream_that_have_other_shapes_are_refused(rows, columns):
    """A residual that ranks have split over tokens, or one that torch would spread."""
    hidden, residual = pair()[0], torch.ones(rows, columns)
    with pytest.raises(NotSupportedError, match=r"parts of shape \[3, 4\] and"):
        cut_of(Pair()).give((hidden, residual))
    pick = Input(1, "hidden_states", (2, "residual"))
    with pytest.raises(NotSupportedError, match=r"parts of shape \[3, 4\] and"):
        cut_of(pick).give(((torch.arange(5), hidden, residual), {}))


def test_rows_that_are_not_numbers_are_written():
    value = pair()
    new, rest = edited(cut_of(Pair()), value, lambda served: served[0].fill_(float("nan")))
    assert (new + rest)[1].isnan().all()
    assert not (new + rest)[2:].isnan().any()


def test_the_stream_that_enters_a_layer_is_found_by_place_and_by_name():
    hidden, residual = pair()
    positions = torch.arange(5)
    pick = Input(1, "hidden_states", (2, "residual"))
    by_place = ((positions, hidden, residual), {})
    by_name = ((positions,), {"hidden_states": hidden, "residual": residual})
    for call in (by_place, by_name):
        assert torch.equal(cut_of(pick).give(call), (hidden + residual)[1:4])
        new = edited(cut_of(pick), call, lambda served: served[2].fill_(7.0))
        found, _ = Input(1, "hidden_states", (2, "residual")).read(new)
        assert torch.equal(found[3], torch.full((4,), 7.0))
        assert new[0][0] is positions


def test_the_first_layer_has_no_second_part():
    hidden, _ = pair()
    pick = Input(0, "hidden_states", (1, "residual"))
    args, _ = edited(cut_of(pick), ((hidden, None), {}), lambda served: served.fill_(1.0))
    assert torch.equal(args[0][1:4], torch.ones(3, 4))
    assert args[1] is None


def test_heads_are_columns_of_a_projection():
    qkv = torch.randn(5, 12)
    keys = Columns(6, 3, 2, 12)
    cut = cut_of(First(), keys)
    assert torch.equal(cut.give((qkv, None)), qkv[1:4, 6:12].unflatten(-1, (3, 2)))
    new, bias = edited(cut_of(First(), keys), (qkv, None), lambda served: served[:, 1].zero_())
    wanted = qkv.clone()
    wanted[1:4, 8:10] = 0
    assert torch.equal(new, wanted)
    assert bias is None


def test_a_projection_of_another_width_is_refused():
    with pytest.raises(NotSupportedError, match="gives 12 columns, not 8"):
        cut_of(First(), Columns(0, 2, 2, 8)).give(torch.randn(5, 12))


def test_values_served_in_inference_mode_can_be_edited():
    with torch.inference_mode():
        value = pair()
        served = cut_of(Pair()).give(value)
    served.add_(1)
    assert served._version > 0


def test_a_whole_value_of_this_process_stays_in_the_graph():
    value = torch.randn(3, 4, requires_grad=True)
    cut = LensCut(WholeCut(), StandardLens(First(), Flat()))
    served = cut.give(value)
    new = cut.put(value, served, cut.marks(served), assigned=False)
    (gradient,) = torch.autograd.grad(new.sum(), served)
    assert torch.equal(gradient, torch.ones(3, 4))
