"""The matrix can say that something is wrong: each class, from a backend that is so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.fake_matrix import Fake, rows, start
from matrix.cells import SEVERAL, Cell, Column, Kind, judged
from matrix.page import page
from matrix.runs import Cells, Task, run_all

REFERENCE = Column("reference", 0)
WANTED = {"value": start(REFERENCE).run("first")}


def cells_of(mood: str) -> dict[str, Cell]:
    """Return the cells of a backend beside others, by row."""
    fake = Fake(mood)
    return {row.name: judged(row, fake, SEVERAL, WANTED, fake.beside)[0] for row in rows()}


GOOD = {"first": Kind.SUPPORTED, "second": Kind.SUPPORTED, "at_its_line": Kind.REFUSED}


@pytest.mark.parametrize(
    ("mood", "row", "kind", "why"),
    [
        ("good", "at_its_line", Kind.REFUSED, "ValueError: cannot be done"),
        ("lies in second", "second", Kind.WRONG, "differs by"),
        ("raises in first", "first", Kind.ERROR, "RuntimeError: something broke"),
        ("leaves in second", "second", Kind.ERROR, "left behind: 1 worker"),
        ("changes a neighbour in first", "first", Kind.WRONG, "got other tokens"),
        ("accepts", "at_its_line", Kind.WRONG, "ran where it must be refused"),
        ("other words", "at_its_line", Kind.ERROR, "not ValueError with 'cannot be'"),
        ("other line", "at_its_line", Kind.ERROR, "at the line"),
    ],
)
def test_what_is_wrong_is_judged_so(mood: str, row: str, kind: Kind, why: str) -> None:
    found = cells_of(mood)
    assert {name: cell.kind for name, cell in found.items()} == {**GOOD, row: kind}
    assert why in found[row].why


def test_a_run_goes_on_behind_a_process_that_hangs_or_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("FAKE_MATRIX_PIDS", str(pids))
    column = Column("hangs in first, dies in second", 2)
    cells = Cells(Task(column, start, rows, tmp_path, gives_reference=False), limit_s=3.0)
    try:
        first, second = (cells.run(name, beside=False) for name in ("first", "second"))
        last = cells.run("at_its_line", beside=True)
    finally:
        cells.close()
    assert first == Cell(Kind.HANG, "no answer in 3 s")
    assert second == Cell(Kind.ERROR, "its process ended with 7")
    assert last.kind is Kind.REFUSED
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_whole_run_is_compared_with_its_first_column_and_shown(tmp_path: Path) -> None:
    columns = [REFERENCE, Column("lies in second", 2)]
    found = run_all(columns, start, rows, tmp_path, 60.0)
    text = page(rows(), columns, found, {"date": "today"})
    assert "| date | today |" in text
    assert "| reference | 3 | 0 | 0 | 0 | 0 |" in text
    assert "| lies in second, beside 7 | 1 | 1 | 0 | 0 | 1 |" in text
    assert "* `second`, lies in second, beside 7: **Silently wrong**, second['value']: an" in text
    assert "| `at_its_line` | Supported | Refused | Refused |" in text
    assert "| `at_its_line` | ValueError: cannot be done |" in text


def test_a_backend_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    column = Column("does not start", 2)
    cells = Cells(Task(column, start, rows, tmp_path, gives_reference=False), limit_s=60.0)
    assert cells.run("first", beside=False) == Cell(Kind.ERROR, "the backend did not start")
