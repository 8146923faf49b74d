from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from nnsight_pp import RankDivergenceError
from nnsight_pp.core.block import Block
from nnsight_pp.core.report import Elsewhere, Failure, Report
from nnsight_pp.wire.merge import first_failure, merge_reports
from nnsight_pp.wire.report_codec import as_witness
from nnsight_pp.wire.value_codec import to_bytes

Pair = namedtuple("Pair", "a b")


@dataclass
class Point:
    x: object
    y: object


def merge(*saved, block=None):
    return merge_reports([Report("r", stage, saved=one) for stage, one in enumerate(saved)], block)


def merged(*saved):
    report = merge(*saved)
    assert report.failure is None
    return report.saved


def failure(stage=0, failed_at=0, *, is_echo=False):
    return Failure("ValueError", "text", None, (), stage, failed_at, is_echo)


def test_each_leaf_is_taken_from_the_stage_that_has_it():
    one = {"x": [torch.ones(1), Elsewhere()], "y": Elsewhere(), "z": {"a": 1}}
    two = {"x": [Elsewhere(), torch.zeros(1)], "y": (1, 2), "z": {"a": 1}}
    found = merged(one, two)
    assert [value.item() for value in found["x"]] == [1.0, 0.0]
    assert (found["y"], found["z"]) == ((1, 2), {"a": 1})


def test_leaves_inside_dataclasses_and_named_tuples_are_merged():
    found = merged(
        {"p": Point(1, Elsewhere()), "q": Pair(Elsewhere(), 2)},
        {"p": Point(Elsewhere(), 2), "q": Pair(1, Elsewhere())},
    )
    assert found == {"p": Point(1, 2), "q": Pair(1, 2)}


def test_what_is_one_container_on_every_stage_is_one_afterwards():
    def saved(real):
        inner = [Elsewhere(), 1] if not real else [torch.ones(1), 1]
        return {"x": inner, "y": (inner, inner), "z": {"a": inner}}

    found = merged(saved(real=False), saved(real=True))
    assert found["x"] is found["y"][0] is found["y"][1] is found["z"]["a"]
    assert found["x"][0] is found["x"][0]


def test_a_view_that_every_stage_has_is_taken_from_the_one_that_has_what_it_shows():
    owned = torch.arange(4.0).reshape(2, 2)
    found = merged(
        {"whole": Elsewhere(), "turned": owned.T.clone()}, {"whole": owned, "turned": owned.T}
    )
    found["whole"][0, 1] = 9
    assert found["turned"][1, 0] == 9


def test_report_of_the_first_stage_names_the_request_and_all_are_counted():
    reports = [
        Report("r", 1, "t", warnings=("b", "a"), statistics={"pulls": 2}),
        Report("r", 0, "t", warnings=("a",), statistics={"pulls": 1}),
    ]
    found = merge_reports(reports)
    assert (found.request, found.stage, found.trace) == ("r", 0, "t")
    assert found.warnings == ("a", "b")
    assert found.statistics == {"0": {"pulls": 1}, "1": {"pulls": 2}}


MISMATCHES = {
    "only one stage saved it": ({"x": 1}, {}),
    "nobody sent it": ({"x": Elsewhere()}, {"x": Elsewhere()}),
    "lengths": ({"x": [1]}, {"x": [1, 2]}),
    "keys": ({"x": {"a": 1}}, {"x": {"b": 1}}),
    "order of keys": ({"x": {"a": 1, "b": 1}}, {"x": {"b": 1, "a": 1}}),
    "kinds": ({"x": [1]}, {"x": (1,)}),
    "container and leaf": ({"x": [1]}, {"x": 1}),
    "numbers": ({"x": 1}, {"x": 2}),
    "texts": ({"x": "a"}, {"x": "b"}),
    "shapes": ({"x": torch.ones(1)}, {"x": torch.ones(2)}),
    "dtypes": ({"x": torch.ones(1)}, {"x": torch.ones(1).half()}),
}


@pytest.mark.parametrize("saved", MISMATCHES.values(), ids=MISMATCHES)
def test_stages_that_disagree_took_different_branches(saved):
    report = merge(*saved)
    assert report.failure is not None
    assert report.failure.name == RankDivergenceError.__name__
    assert "disagree about the saved value 'x'" in report.failure.text
    assert report.saved == {}


def test_a_difference_is_told_with_its_place_both_values_and_the_line():
    block = Block("steer.py", 12, "    x = []\n    x.append(clock())\n    y = x[0]\n", "steer")
    one, other = [{"x": [0.5, {"a": number}], "y": 1} for number in (7, 8)]
    report = merge(one, other, block=block)
    assert report.failure is not None
    text = report.failure.text
    assert "'x', at x[1]['a']: stage 0 has 7, stage 1 has 8." in text
    assert "steer.py:12" in text
    assert report.failure.frames == (("steer.py", 12, "steer"),)
    assert report.saved == {"y": 1}


def test_a_difference_behind_tensors_of_single_stages_is_told_with_its_place():
    one = {"x": {(0, "a"): torch.ones(1), (1, "b"): Elsewhere(), (2, "c"): torch.ones(1)}}
    two = {"x": {(0, "a"): Elsewhere(), (1, "b"): torch.ones(1), (2, "c"): torch.zeros(1)}}
    found = merge(one, two)
    assert found.failure is not None
    assert "at x[(2, 'c')][0]" in found.failure.text


def test_nobody_having_a_tensor_of_many_is_told():
    found = merge({"x": [torch.ones(1), Elsewhere()]}, {"x": [Elsewhere(), Elsewhere()]})
    assert found.failure is not None
    assert "at x[1]: no stage sent it" in found.failure.text


@pytest.mark.parametrize(
    ("mine", "theirs"), [(1, True), (1, 2), ("a", b"a"), ((1, "a"), (1, "b"))], ids=str
)
def test_keys_that_differ_are_a_difference(mine, theirs):
    assert merge({"x": {mine: torch.ones(1)}}, {"x": {theirs: Elsewhere()}}).failure is not None


def test_keys_that_are_alike_up_to_rounding_are_alike():
    third = torch.tensor(1 / 3).item()
    found = merged({"x": {third: torch.ones(1)}}, {"x": {third + 1e-9: Elsewhere()}})
    assert list(found["x"]) == [third]


def test_a_third_stage_is_compared_too():
    report = merge({"x": 1}, {"x": Elsewhere()}, {"x": 2})
    assert report.failure is not None
    assert "stage 0 has 1, stage 2 has 2" in report.failure.text


def witnessed(own, witness, **options):
    lead = Report("r", 0, saved=own)
    return merge_reports([as_witness(Report("r", 0, saved=witness)), lead], **options)


def test_another_tensor_parallel_rank_must_say_the_same():
    value = torch.arange(300.0)
    same = {"x": value, "y": [1, 2]}
    report = witnessed(same, {"x": value.clone(), "y": [1, 2]})
    assert report.failure is None
    assert report.saved["x"] is value
    for other in ({"x": value + 1, "y": same["y"]}, {"x": value, "y": [2, 1]}, {"x": value}):
        report = witnessed(same, other)
        assert report.failure is not None
        assert "on stage 0 one tensor-parallel rank has" in report.failure.text


def test_a_block_that_looks_at_a_part_of_a_weight_may_differ_between_tensor_parallel_ranks():
    own, other = {"x": torch.arange(4.0)}, {"x": torch.arange(4.0) + 4}
    assert witnessed(own, other, sees_parts=lambda: True).failure is None


def test_a_witness_ships_no_tensor():
    report = Report("r", 0, saved={"x": [torch.ones(1000)], "y": 1}, kept={"z": torch.ones(9)})
    assert len(to_bytes(as_witness(report))) < 2000


def test_after_a_failure_what_does_not_fit_is_left_out():
    reports = [
        Report("r", 0, saved={"x": 1, "y": 2}, failure=failure()),
        Report("r", 1, saved={"y": 2}),
    ]
    found = merge_reports(reports)
    assert found.saved == {"y": 2}
    assert found.failure == failure()


def test_first_failure_of_the_block_wins_and_an_echo_comes_last():
    early, late = failure(stage=1, failed_at=2), failure(stage=0, failed_at=5)
    echo = failure(stage=0, failed_at=0, is_echo=True)
    assert first_failure([late, echo, early]) is early
    assert first_failure([echo]) is echo
    assert first_failure([]) is None


def test_stages_that_asked_for_different_values_have_diverged():
    one = Report("r", 0, trail=(3, 5))
    other = Report("r", 1, trail=(4, 6))
    failure_of_both = merge_reports([one, other]).failure
    assert failure_of_both is not None
    assert failure_of_both.name == RankDivergenceError.__name__
    assert "stage 0: 3" in failure_of_both.text
    failed = Report("r", 1, failure=failure(stage=1), trail=(4, 6))
    assert merge_reports([one, failed]).failure is not None
