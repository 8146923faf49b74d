"""Whole tensors between real processes, without the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import lane_scenarios as scenarios
from harness import link_scenarios
from harness.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.whole_tensors_cross_by_themselves,
        scenarios.parts_cross_by_themselves,
        scenarios.an_owner_that_keeps_the_interpreter_answers,
        scenarios.what_the_lane_does_not_know_python_answers,
        scenarios.nothing_of_a_request_is_left,
        scenarios.one_side_has_no_extension,
        scenarios.a_signal_is_handled_while_a_line_waits,
        scenarios.a_malformed_head_costs_a_line,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_two_ranks(two: Ranks, scenario: Callable[..., Any]):
    two.run(scenario)


def test_a_body_that_cannot_be_told_from_the_next_one_ends_every_wait():
    with Ranks(2) as ranks:
        ranks.run(scenarios.an_answer_with_an_unknown_body_loses_the_peer)


def test_three_ranks():
    with Ranks(3) as three:
        three.run(scenarios.whole_tensors_cross_by_themselves)
        three.run(scenarios.nothing_of_a_request_is_left)
        three.run(link_scenarios.many_pulls_in_all_directions, 200)
