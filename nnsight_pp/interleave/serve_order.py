"""An order of serving that nobody may rely on: for tests.

Requests that wait for the same value are served one after the other, and no result may depend on
which comes first. Workers of one request do depend on their order, and keep it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from nnsight_pp.interleave.worker import Worker


@final
class ShuffledRequests:
    """Orders workers by request, in another random order each time.

    Those that share names stay in the order of their blocks.

    Args:
        seed: Of the order.
    """

    __slots__ = ("_random",)

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def __call__(self, workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
        """Return ``workers`` in the order in which they are served now."""
        strangers = list(dict.fromkeys(_with_whom(worker) for worker in workers))
        self._random.shuffle(strangers)
        return tuple(sorted(workers, key=lambda worker: strangers.index(_with_whom(worker))))


def _with_whom(worker: Worker) -> object:
    """Return what a worker has in common with those among whom its place in the order counts."""
    return worker.request if worker.timeline is None else worker.timeline
