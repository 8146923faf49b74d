"""A module of the user's own, which blocks import while they run."""

from __future__ import annotations

import os

counter = 0
rows: list[float] = []


def add() -> int:
    """Count, in the module."""
    global counter
    counter += 1
    return counter


def variable() -> str:
    """Look at the environment."""
    return os.environ["HOME"]
