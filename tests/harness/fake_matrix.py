"""Backends and rows for the test of the matrix: they lie, raise, hang, die and leave things."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from engine.compare import ChangedNeighbourError
from matrix.cells import ENGINES, EVERYWHERE, Column, Refused, Row


class Fake:
    """Gives a tensor; ``mood`` says what else it does."""

    def __init__(self, mood: str) -> None:
        self.mood = mood
        self.left = 0
        self.row = ""

    def run(self, row: str) -> Any:
        self.row = row
        if f"hangs in {row}" in self.mood:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(os.environ["FAKE_MATRIX_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if f"dies in {row}" in self.mood:
            os._exit(7)
        if self.mood == f"raises in {row}":
            raise RuntimeError("something broke")
        self.left = int(self.mood == f"leaves in {row}")
        return torch.tensor([2.0, 2.0 + 0.01 * (self.mood == f"lies in {row}")])

    def context(self) -> Any:
        return contextlib.nullcontext()

    def neighbours(self) -> Any:
        return self

    @contextlib.contextmanager
    def beside(self) -> Any:
        yield
        if self.mood == f"changes a neighbour in {self.row}":
            raise ChangedNeighbourError("neighbour 3 got other tokens")

    def assert_idle(self) -> None:
        assert not self.left, "1 worker"

    def close(self) -> None:
        self.left = 0


def start(column: Column) -> Fake:
    if column.name == "does not start":
        raise RuntimeError("no memory")
    return Fake(column.name)


def first(b: Fake) -> Any:
    return {"value": b.run("first")}


def second(b: Fake) -> Any:
    return {"value": b.run("second")}


def at_its_line(b: Fake) -> Any:
    b.row, b.left = "", 0
    if b.mood in ("reference", "accepts"):
        return {}
    if b.mood == "other words":
        raise ValueError("no reason")  # <-
    if b.mood == "other line":
        raise ValueError("cannot be done")
    raise ValueError("cannot be done")  # <-


def rows() -> list[Row]:
    refused = Refused(at_its_line, "ValueError", "cannot be", ENGINES, EVERYWHERE)
    return [
        Row("first", first),
        Row("second", second),
        Row("at_its_line", at_its_line, refused),
    ]
