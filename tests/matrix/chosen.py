"""The rows and columns of the matrix."""

from __future__ import annotations

import os
from typing import Any

from engine.backends import Engine, Local
from engine.refused_blocks import REFUSED
from engine.table import BLOCKS
from matrix.cells import Column, Row

ROWS = [Row(name, run) for name, run in BLOCKS.items()]
ROWS += [Row(name, one.run, one) for name, one in REFUSED.items()]
COLUMNS = {
    "local": Column("local", 0),
    "1": Column("1 rank", 1),
    "2": Column("2 stages", 2),
    "3": Column("3 stages", 3),
    # Of the random Qwen2, whose heads two ranks can split.
    "tp2": Column("tp 2", 1, tp=2),
    "tp2x2": Column("tp 2, 2 stages", 2, tp=2),
    # SmolLM2 has nine heads, which three ranks can split.
    "tp3": Column("tp 3", 1, tp=3),
    "tp3x2": Column("tp 3, 2 stages", 2, tp=3),
}


def rows() -> list[Row]:
    """Return the chosen rows; each process of the run calls this."""
    chosen = os.environ.get("NNSIGHT_PP_MATRIX_ROWS", "").split()
    return [row for row in ROWS if not chosen or row.name in chosen]


def start(column: Column) -> Any:
    """Return the backend of ``column``, up."""
    path = os.environ["NNSIGHT_PP_TEST_MODEL"]
    return Engine(path, column.stages, tp=column.tp) if column.stages else Local(path)
