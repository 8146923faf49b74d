import pytest
import torch

from nnsight_pp import RowsError
from nnsight_pp.core.rows import BatchCut, Rows, TokenCut, WholeCut


def put(cut, live, edit, *, assigned=False):
    """Give ``live`` to ``edit`` and put back what it returns (None: the served object)."""
    served = cut.give(live)
    marks = cut.marks(served)
    changed = edit(served)
    return cut.put(live, served if changed is None else changed, marks, assigned=assigned)


def zero(value):
    value.zero_()


def rows(start, count, total, kind=BatchCut):
    return kind(Rows(start, count, total))


@pytest.fixture
def live():
    return torch.arange(12.0).reshape(4, 3)


def test_whole_cut_gives_the_live_object(live):
    cut = WholeCut()
    assert cut.give(live) is live
    assert put(cut, live, lambda value: None) is live
    assert put(cut, live, lambda value: "anything", assigned=True) == "anything"


def test_batch_cut_gives_views_and_edits_land_through_them(live):
    result = put(rows(1, 2, 4), live, zero)
    assert result is live
    assert (live[1:3] == 0).all()
    assert (live[[0, 3]] != 0).any()


def test_batch_cut_splices_what_was_assigned(live):
    new = torch.full((2, 3), 9.0)
    before = live.clone()
    result = put(rows(1, 2, 4), live, lambda value: new, assigned=True)
    assert torch.equal(result[1:3], new)
    assert torch.equal(result[[0, 3]], before[[0, 3]])
    assert torch.equal(live, before)


def test_batch_cut_splices_a_replaced_leaf_of_a_container(live):
    def edit(value):
        value["a"] = value["a"] * 0

    result = put(rows(0, 1, 4), {"a": live, "b": [torch.ones(())]}, edit)
    assert (result["a"][0] == 0).all()
    assert torch.equal(result["a"][1:], live[1:])


def test_batch_cut_leaves_other_sizes_and_scalars_whole(live):
    cut = rows(1, 2, 4)
    value = (torch.ones(3), torch.tensor(1.0), "text", None)
    assert all(given is own for given, own in zip(cut.give(value), value, strict=True))


def test_batch_cut_narrows_the_named_results_of_torch(live):
    given = rows(1, 2, 4).give(torch.max(live, dim=1))
    assert torch.equal(given.values, live[1:3].max(dim=1).values)
    result = put(rows(1, 2, 4), torch.max(live, dim=1), lambda value: value)
    assert torch.equal(result.values, live.max(dim=1).values)


@pytest.mark.parametrize("new", [torch.ones(1, 3), torch.ones(4, 3), torch.tensor(1.0), "text"])
def test_batch_cut_refuses_another_number_of_rows(live, new):
    with pytest.raises(RowsError, match="rows were assigned, and this prompt has 2"):
        rows(1, 2, 4).check(live, new)


def test_batch_cut_refuses_another_structure(live):
    with pytest.raises(RowsError, match="2 values were assigned where the model has 1"):
        rows(1, 2, 4).check(live, (live, live))


def test_token_cut_gives_copies_and_an_untouched_one_changes_nothing(live):
    cut = rows(1, 2, 4, TokenCut)
    given = cut.give(live)
    assert torch.equal(given, live[1:3])
    assert given.data_ptr() != live[1:3].data_ptr()
    assert put(cut, live, lambda value: None) is live


def test_token_cut_writes_an_edited_copy_back_in_place(live):
    result = put(rows(1, 2, 4, TokenCut), live, zero)
    assert result is live
    assert (live[1:3] == 0).all()


def test_token_cut_writes_into_inference_tensors():
    with torch.inference_mode():
        live = torch.ones(4, 3)
    result = put(rows(1, 2, 4, TokenCut), live, zero)
    assert result.is_inference()
    assert (result[1:3] == 0).all()
    assert (result[0] == 1).all()


def test_token_cut_does_not_write_an_assigned_value_into_the_live_tensor(live):
    before = live.clone()
    new = torch.full((2, 3), 9.0)
    result = put(rows(1, 2, 4, TokenCut), live, lambda value: new, assigned=True)
    assert torch.equal(live, before)
    assert torch.equal(result[1:3], new)


def test_token_cut_does_not_write_into_memory_that_elements_share():
    live = torch.ones(1, 3).expand(4, 3)
    result = put(rows(1, 2, 4, TokenCut), live, zero)
    assert (result[1:3] == 0).all()
    assert (result[[0, 3]] == 1).all()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (torch.ones(4, 3), "Shape"),
        (torch.ones(2, 4), "Shape"),
        (1.0, "A float was assigned"),
        ((torch.ones(2, 3), None), "2 values"),
    ],
)
def test_token_cut_refuses_what_does_not_fit(live, new, message):
    with pytest.raises(RowsError, match=f"(?i){message}"):
        rows(1, 2, 4, TokenCut).check(live, new)


def test_token_cut_refuses_an_edit_of_what_all_requests_share():
    shared = torch.ones(5)
    with pytest.raises(RowsError, match="no rows of its own"):
        put(rows(1, 2, 4, TokenCut), shared, zero)
