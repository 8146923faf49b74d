"""What a loop brings from an earlier stage in each step is asked for before a line needs it."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_pp.core.location import Location
from nnsight_pp.interleave.habits import Habits
from tests.fakes.pipeline import Pipeline, Request

LAYER = Location("model.layers.0", "output")


def asked_by(block: str, num_stages: int = 2) -> tuple[int, int]:
    """Return how many questions the last stage has asked, and how many answers it has used."""
    pipeline = Pipeline(num_stages, seed=3)
    outcome = pipeline.run([Request("r", "        out = []" + block, 5, 2, 6, False)])["r"]
    assert outcome.error is None
    assert pipeline.rest() == {}
    alone = Pipeline(1, seed=3).run([Request("r", "        out = []" + block, 5, 2, 6, False)])["r"]
    assert outcome.seen() == alone.seen()
    return pipeline.links[-1].num_pulls, sum(one.num_pulls for one in outcome.pulls[-1])


@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_is_needed_in_every_step_is_asked_for_once_a_step(num_stages: int):
    block = """
        for s in steps[:6]:
            early = L[0].output[-1]
            L[4].output[-1] += early
"""
    assert asked_by(block, num_stages) == (6, 6)


def test_two_parts_of_one_value_are_each_asked_for_once_a_step():
    block = """
        for s in steps[:5]:
            early = L[0].output
            L[4].output[-1] += early[-1] * 2
            L[4].output[-1] -= early[0] * 3
"""
    assert asked_by(block) == (10, 10)


def test_a_value_that_is_needed_now_and_then_is_asked_for_in_vain_at_most_once_each_time():
    block = """
        for s in steps[:6]:
            early = L[0].output[-1]
            if s in (0, 3):
                out.append(early * 2)
"""
    assert asked_by(block) == (4, 2)


def test_another_part_in_each_step_is_asked_for_ahead_only_once():
    block = """
        for s in steps[:6]:
            early = L[0].output
            out.append(early[0][s % 3] * 2)
"""
    assert asked_by(block) == (7, 6)


def test_nothing_is_noted_of_what_is_never_asked_for_ahead(monkeypatch: pytest.MonkeyPatch):
    noted: list[Location] = []
    note = Habits.note

    def noting(habits: Habits, location: Location, *rest: Any) -> None:
        noted.append(location)
        note(habits, location, *rest)

    monkeypatch.setattr(Habits, "note", noting)
    block = """
        for s in steps[:6]:
            late = L[4].output
            out.append(late[0][s % 3] * 2)
"""
    assert Pipeline(2, seed=3).run([Request("r", "        out = []" + block, 5, 2, 6, False)])
    assert noted == []


def test_what_was_not_brought_since_it_was_last_named_is_no_habit():
    habits = Habits()
    habits.note(LAYER, "(0,)", (0,))
    habits.note(LAYER, "(1,)", (1,))
    assert habits.take(LAYER) == {"(0,)": (0,), "(1,)": (1,)}
    assert habits.take(LAYER) == {}


def test_an_irregular_location_is_never_asked_for_ahead_again():
    habits = Habits()
    habits.note(LAYER, "(0,)", (0,))
    habits.break_off(LAYER)
    habits.note(LAYER, "(0,)", (0,))
    assert habits.take(LAYER) == {}
