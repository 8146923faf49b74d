"""What a cell of the matrix is, and how one is judged.

A row is one block, a column is one backend, alone or with seven other requests in its steps.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.compare import ChangedNeighbourError, assert_same

# Behind the line of a block at which it must be refused.
MARK = "# <-"
# RANKS: one stage, whose layers several ranks split.
LOCAL, ONE, RANKS, SEVERAL = "local", "one", "ranks", "several"
ENGINES = frozenset({ONE, RANKS, SEVERAL})
EVERYWHERE = ENGINES | {LOCAL}


@dataclass(frozen=True)
class Refused:
    """A block, and the error that it must give.

    Attributes:
        run: Runs it on a backend.
        error: The class of the error, by name.
        words: Part of the error's text.
        where: Whether it is refused in this process, on one rank, on ranks of one stage, on several
            stages.
        runs: Where it can be written at all. Where it is not refused, it gives values.
    """

    run: Callable[[Any], dict[str, Any]]
    error: str
    words: str
    where: frozenset[str]
    runs: frozenset[str]


class Kind(StrEnum):
    """What a cell says."""

    SUPPORTED = "Supported"
    REFUSED = "Refused"
    ERROR = "Error"
    HANG = "Hang"
    WRONG = "Silently wrong"
    ABSENT = "-"


BAD = (Kind.ERROR, Kind.HANG, Kind.WRONG)


@dataclass(frozen=True)
class Cell:
    """One cell: what it says, and the words for why."""

    kind: Kind
    why: str = ""


@dataclass(frozen=True)
class Column:
    """One backend.

    Attributes:
        name: As the page shows it.
        stages: How many stages; 0 is the model in this process.
        tp: How many ranks split each layer.
    """

    name: str
    stages: int
    tp: int = 1

    @property
    def place(self) -> str:
        """What a refused row calls it."""
        if self.stages < 2:
            return LOCAL if not self.stages else ONE if self.tp == 1 else RANKS
        return SEVERAL


@dataclass(frozen=True)
class Row:
    """One block, and the error that it must give where it must give one."""

    name: str
    run: Callable[[Any], dict[str, Any]]
    refused: Refused | None = None

    def is_refused(self, place: str) -> bool:
        return self.refused is not None and place in self.refused.where

    def runs(self, place: str) -> bool:
        return self.refused is None or place in self.refused.runs


def judged(
    row: Row, backend: Any, place: str, wanted: Any, beside: Callable[[], Any] | None
) -> tuple[Cell, Any]:
    """Run ``row`` and return its cell, and what it gave.

    Args:
        row: The block.
        backend: What it runs on.
        place: What a refused row calls the backend.
        wanted: What it must give; None where nothing is known, in the column that finds out.
        beside: Makes the context in which seven others run too.
    """
    found: Any = None
    try:
        with backend.context(), beside() if beside else contextlib.nullcontext():
            found = row.run(backend)
    except ChangedNeighbourError as error:
        return Cell(Kind.WRONG, _first_line(error)), None
    except Exception as error:
        cell = _of_error(row, place, error)
    else:
        cell = _of_values(row, place, found, wanted)
    if cell.kind not in BAD:
        try:
            backend.assert_idle()
        except AssertionError as error:
            cell = Cell(Kind.ERROR, f"left behind: {_first_line(error)}")
    return cell, found


def _of_values(row: Row, place: str, found: Any, wanted: Any) -> Cell:
    if row.is_refused(place):
        return Cell(Kind.WRONG, "ran where it must be refused")
    if wanted is not None:
        try:
            assert_same(found, wanted, row.name)
        except Exception as error:
            return Cell(Kind.WRONG, _first_line(error))
    return Cell(Kind.SUPPORTED)


def _of_error(row: Row, place: str, error: Exception) -> Cell:
    name, said = type(error).__name__, f"{type(error).__name__}: {_first_line(error)}"
    if row.refused is None or not row.is_refused(place):
        return Cell(Kind.ERROR, said)
    if name != row.refused.error or row.refused.words not in str(error):
        wanted = f"{row.refused.error} with {row.refused.words!r}"
        return Cell(Kind.ERROR, f"{said} - not {wanted}")
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(row.run.__code__.co_filename)
    lines = [frame.line or "" for frame in frames if Path(frame.filename) == file]
    if not lines or MARK not in lines[-1]:
        return Cell(Kind.ERROR, f"{said} - at the line {lines[-1:]}")
    return Cell(Kind.REFUSED, said)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
