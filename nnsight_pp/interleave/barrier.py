"""A point at which blocks wait for one another: `barrier = tracer.barrier(2)`, then `barrier()`."""

from __future__ import annotations

from typing import final

from nnsight_pp.interleave.kept_open import join
from nnsight_pp.interleave.worker import current_worker


@final
class Barrier:
    """Opens when ``count`` blocks have called it, and closes behind them.

    Args:
        count: How many blocks it waits for.
    """

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"a barrier takes the number of blocks it waits for, not {count!r}")
        self.count = count

    def __call__(self) -> None:
        """Wait until as many blocks have come here; they go on in the order of arrival."""
        worker = current_worker(repr(self))
        assert worker.turns is not None
        worker.turns.check_barrier(worker, self)
        join(worker.turns, worker, self, self.count)

    def __repr__(self) -> str:
        return f"`tracer.barrier({self.count})`"
