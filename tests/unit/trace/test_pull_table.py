"""What a run has pulled, by stage pair and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnsight_pp.core.report import PullRecord
from nnsight_pp.trace.pull_table import PullTable


@pytest.fixture
def block(tmp_path: Path) -> str:
    path = tmp_path / "study.py"
    path.write_text("with model.trace('x'):\n    late += early\n    later += late\n")
    return str(path)


def test_records_of_one_line_are_one_row(block: str) -> None:
    table = PullTable.of(
        [
            (1, PullRecord(0, "a", block, 2, 3, 400, 0.001)),
            (2, PullRecord(0, "a", block, 2, 1, 100, 0.5)),
            (1, PullRecord(0, "b", block, 2, 2, 600, 0.002)),
            (1, PullRecord(0, "a", block, 3, 1, 50, 0.0)),
        ]
    )
    rows = [(one.puller, one.owner, one.line, one.locations, one.pulls, one.bytes) for one in table]
    assert rows == [
        (1, 0, 2, ("a", "b"), 5, 1000),
        (1, 0, 3, ("a",), 1, 50),
        (2, 0, 2, ("a",), 1, 100),
    ]
    assert table[0].waited_ms == pytest.approx(3.0)
    pairs = table.pairs
    assert pairs[1, 0] == (6, 1050, pytest.approx(3.0))
    assert pairs[2, 0] == (1, 100, pytest.approx(500.0))


def test_it_prints_the_users_lines(block: str) -> None:
    table = PullTable.of([(1, PullRecord(0, "a", block, 2, 3, 1234, 0.001))])
    head, row = str(table).splitlines()
    assert head.split() == ["stages", "pulls", "bytes", "ms", "waited", "line"]
    assert row.split(maxsplit=6) == [
        "1",
        "<-",
        "0",
        "3",
        "1,234",
        "1.00",
        "study.py:2  late += early",
    ]
    assert str(PullTable.of([])) == "nothing was pulled"


def test_a_line_that_is_not_known_is_shown_as_such() -> None:
    table = PullTable.of([(1, PullRecord(0, "a", "", 0, 1, 8, 0.0))])
    assert table[0].text == ""
    assert "?:0" in repr(table)
