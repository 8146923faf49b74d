"""Two processes that time something between them, for suites without an engine."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_BOUND_S = 120


def samples_of_two(run: Callable[[int, str, Connection, int], None], rounds: int) -> Any:
    """Run ``run(rank, store, pipe, rounds)`` in two processes; return what one of them sends.

    Args:
        run: A function of a module. ``store`` is a path at which the two may meet.
        rounds: Handed on.

    Raises:
        RuntimeError: Nothing came in time.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run, args=(rank, f"{folder}/store", theirs, rounds))
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        try:
            samples = ours.recv() if ours.poll(_BOUND_S) else None
        finally:
            for rank in ranks:
                rank.join(20)
                if rank.is_alive():
                    rank.kill()
    if samples is None:
        raise RuntimeError(f"the two ranks did not answer within {_BOUND_S} s")
    return samples
