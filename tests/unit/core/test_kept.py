import pytest
import torch

from nnsight_pp.core.kept import AtHome, Kept, NotKeptError, with_kept
from nnsight_pp.core.report import Elsewhere, Report
from nnsight_pp.wire.merge import merge_reports
from nnsight_pp.wire.value_codec import from_bytes, to_bytes


def kept_by(stage, value):
    """Return what ``stage`` reports of ``value``: tensors stay, a text stands for another's."""

    def keep(key, leaf):
        if isinstance(leaf, torch.Tensor):
            return Kept(key, (stage,))
        if isinstance(leaf, list | Elsewhere):
            return leaf
        raise NotKeptError(type(leaf).__name__)

    return with_kept(value, "r/x", keep)


def merged(*parts):
    reports = [Report("r", stage, kept={"x": part}) for stage, part in enumerate(parts)]
    return merge_reports(from_bytes(to_bytes(reports))).kept["x"]


def test_plain_data_travels_and_tensors_stay_under_a_key_of_their_place():
    found = kept_by(0, {"a": [1, torch.ones(1)], "b": ("text", None, torch.zeros(2))})
    assert found["a"][0] == 1
    assert found["b"][:2] == ("text", None)
    assert (found["a"][1].key, found["b"][2].key) == ("r/x/0/1", "r/x/1/2")


def test_a_tensor_of_several_stages_names_them_all():
    found = merged(kept_by(0, [torch.ones(1)]), kept_by(1, [torch.ones(1)]))
    assert (found[0].key, found[0].stages) == ("r/x/0", (0, 1))


def test_what_another_stage_has_is_taken_from_it():
    one = [kept_by(0, torch.ones(1)), Elsewhere()]
    two = [Elsewhere(), kept_by(1, (torch.ones(1), 3))]
    found = merged(one, two)
    assert found[0].stages == (0,)
    assert found[1][0].stages == (1,)
    assert found[1][1] == 3


def test_more_than_plain_data_is_not_kept():
    with pytest.raises(NotKeptError, match="function"):
        kept_by(0, [1, lambda: None])


@pytest.mark.parametrize("other", [Elsewhere(), 2, (1,)])
def test_what_no_stage_has_or_all_have_differently_is_lost(other):
    first = Elsewhere() if isinstance(other, Elsewhere) else 1
    found = merged(first, other)
    assert isinstance(found, AtHome)
    assert found.kind == "lost"
