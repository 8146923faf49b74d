"""Runs cells in a process of their own, so that one that hangs or crashes ends itself only.

A process starts its backend once and runs the cells that it is sent, one after the other. One that
does not answer in time is killed with every process that it has started; so is one whose cell was
not as it should be, whose engine may not be as it was. The next cell gets a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from matrix.cells import BAD, Cell, Column, Kind, Row, judged

# A start compiles nothing, but several ranks load a model on few cores.
START_S = 300.0


@dataclass(frozen=True)
class Task:
    """What a process is told at its start; each field can be pickled.

    Attributes:
        column: The backend to start.
        start: Starts it; a function of a module.
        rows: Returns the rows; a function of a module.
        values: A folder for what the first column gives, by row, and the others compare with.
        gives_reference: Whether this is the column that the others are compared with.
    """

    column: Column
    start: Callable[[Column], Any]
    rows: Callable[[], Sequence[Row]]
    values: Path
    gives_reference: bool


def _serve(task: Task, channel: Any) -> None:
    """Run what comes over ``channel``, until it ends."""
    os.setsid()
    rows = {row.name: row for row in task.rows()}
    backend = task.start(task.column)
    try:
        channel.send("up")
        neighbours: Any = None
        while (order := channel.recv()) is not None:
            name, is_beside = order
            if is_beside and neighbours is None:
                neighbours = backend.neighbours()
            beside = neighbours.beside if is_beside else None
            channel.send(_answer(task, rows[name], backend, beside))
    finally:
        backend.close()


def _answer(task: Task, row: Row, backend: Any, beside: Any) -> Cell:
    file = task.values / f"{row.name}.pt"
    try:
        wanted = None
        if not task.gives_reference and not row.is_refused(task.column.place) and file.exists():
            wanted = torch.load(file, weights_only=False)
        torch.manual_seed(1)
        cell, found = judged(row, backend, task.column.place, wanted, beside)
        if task.gives_reference and cell.kind is Kind.SUPPORTED:
            torch.save(found, file)
    except Exception:
        cell = Cell(Kind.ERROR, traceback.format_exc().strip().splitlines()[-1])
    return cell


class Cells:
    """The cells of one column, run one at a time.

    Args:
        task: What its processes are told.
        limit_s: How long a cell may take.
    """

    def __init__(self, task: Task, limit_s: float) -> None:
        self._task = task
        self._limit_s = limit_s
        self._process: Any = None
        self._channel: Any = None

    def run(self, name: str, *, beside: bool) -> Cell:
        """Run one cell; start a process for it if there is none."""
        if self._process is None and not self._start():
            self.kill()
            return Cell(Kind.ERROR, "the backend did not start")
        self._channel.send((name, beside))
        cell = self._received(self._limit_s)
        if cell is None:
            cell = Cell(Kind.HANG, f"no answer in {self._limit_s:g} s")
        if cell.kind in BAD:
            self.kill()
        return cell

    def _start(self) -> bool:
        spawn = multiprocessing.get_context("spawn")
        self._channel, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(self._task, theirs))
        self._process.start()
        theirs.close()
        answer = self._received(START_S)
        return answer == "up"

    def _received(self, limit_s: float) -> Any:
        """Return the answer; None if none comes in time; an error's cell from a dead process."""
        try:
            return self._channel.recv() if self._channel.poll(limit_s) else None
        except (EOFError, ConnectionError):
            self._process.join()
            return Cell(Kind.ERROR, f"its process ended with {self._process.exitcode}")

    def close(self) -> None:
        """End the process, which ends its engine."""
        if self._process is not None:
            with contextlib.suppress(ConnectionError):
                self._channel.send(None)
            self._process.join(60)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it has started, however busy they are."""
        if self._process is None:
            return
        for pid in [*_descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._channel.close()
        self._process = self._channel = None


def _descendants(pid: int) -> Iterator[int]:
    """Return the processes below ``pid``, as /proc knows them, lowest first."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield from _descendants(child)
                yield child


def run_all(
    columns: Sequence[Column],
    start: Callable[[Column], Any],
    rows: Callable[[], Sequence[Row]],
    values: Path,
    limit_s: float,
    *,
    is_alone: bool = False,
) -> dict[tuple[str, str, bool], Cell]:
    """Return the cells by row, column and whether others ran beside.

    The first column is the one that the others are compared with; nothing runs beside it, nor
    beside any if ``is_alone``.
    """
    found: dict[tuple[str, str, bool], Cell] = {}
    for column in columns:
        is_first = column is columns[0]
        cells = Cells(Task(column, start, rows, values, is_first), limit_s)
        try:
            for is_beside in (False,) if is_first or is_alone else (False, True):
                for row in rows():
                    cell = Cell(Kind.ABSENT)
                    if row.runs(column.place):
                        cell = cells.run(row.name, beside=is_beside)
                    found[row.name, column.name, is_beside] = cell
                    if cell.kind in BAD:
                        beside = " beside 7" if is_beside else ""
                        print(f"{column.name}{beside}: {row.name}: {cell}", file=sys.stderr)
        finally:
            cells.close()
    return found
