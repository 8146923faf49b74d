"""`GlooLink` between real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness import link_scenarios as scenarios
from harness.ranks import Ranks


@pytest.fixture(scope="module")
def started() -> Iterator[list[Ranks]]:
    pool: list[Ranks] = []
    yield pool
    for ranks in pool:
        ranks.close()


@pytest.fixture
def two(started: list[Ranks]) -> Ranks:
    """Two ranks, shared by the tests until one fails in them."""
    if not started or started[-1].is_broken:
        started.append(Ranks(2))
    return started[-1]


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.every_value_crosses,
        scenarios.a_part_moves_only_the_part,
        scenarios.a_pull_waits_until_it_is_published,
        scenarios.a_closed_step_is_out_of_order,
        scenarios.what_cannot_be_sent_is_an_error,
        scenarios.another_question_under_the_same_number_diverges,
        scenarios.a_malformed_message_costs_a_line,
        scenarios.released_everywhere_leaves_nothing,
        scenarios.a_busy_forward_thread_keeps_nobody_waiting,
        scenarios.a_peer_that_stopped_answers_nothing,
        scenarios.a_timeout_says_who_did_not_answer,
        scenarios.a_stage_whose_threads_stand_still_has_no_answer,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_two_ranks(two: Ranks, scenario: Callable[..., Any]):
    two.run(scenario)


def test_a_thousand_pulls_in_both_directions_at_once(two: Ranks):
    two.run(scenarios.many_pulls_in_all_directions, 1000)


def test_three_ranks():
    with Ranks(3) as three:
        three.run(scenarios.every_value_crosses)
        three.run(scenarios.a_pull_waits_until_it_is_published)
        three.run(scenarios.released_everywhere_leaves_nothing)
        three.run(scenarios.many_pulls_in_all_directions, 200)


def test_the_death_of_a_peer_ends_every_wait_for_it():
    with Ranks(2) as ranks:
        assert ranks.run(scenarios.a_peer_dies, dying=(0,)) == [None, "survived"]
