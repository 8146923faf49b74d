"""The table that a wait prints when its time has run out."""

from __future__ import annotations

from nnsight_pp.core.standing import Standing, grid


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]


def test_only_the_last_open_step_says_what_the_block_does():
    table = rows(grid({0: Standing(2, 2, 7, "parked on Step 3"), 1: Standing(2, 1, 5, "w")}, 1))
    assert table == [
        ["", "stage 0", "stage 1"],
        ["step 1", "closed", "closed"],
        ["step 2", "closed, parked on Step 3", "open, w <-- waiting here"],
        ["asks", "7", "5"],
    ]


def test_a_stage_that_does_not_answer_has_no_answer_in_each_step():
    table = rows(grid({0: None, 1: Standing(0, -1, 1, "w"), 2: Standing(-1, -1, 0, "n")}, 1))
    assert table[1] == ["step 0", "no answer", "open, w <-- waiting here", "not begun, n"]
    assert table[2] == ["asks", "", "1", "0"]


def test_of_a_long_generation_only_the_last_steps_are_printed():
    table = rows(grid({0: Standing(900, 899, 9, "a"), 1: Standing(900, -1, 9, "b")}, 1))
    assert [row[0] for row in table] == ["", *(f"step {n}" for n in range(895, 901)), "asks"]
