"""Answers of other stages that no lazy value of this rank stands for any more.

Their owners keep them until every other stage has said so, or the request is over. So a generation
keeps no more the longer it gets.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from nnsight_pp.core.protocols import Link


@final
class LetGo:
    """What this rank will not pull any more, and has not told yet."""

    __slots__ = ("_asks", "at_least")

    def __init__(self) -> None:
        # Request, owner, number, and the step (None for a call, which may be answered later).
        self._asks: deque[tuple[str, int, int, int | None]] = deque()
        # How many are told at a time: a message costs both stages more than some kept answers.
        self.at_least = 32

    def add(self, request: str, owner: int, number: int, step: int | None) -> None:
        """Note one ask. The garbage collector may call this, on any thread."""
        self._asks.append((request, owner, number, step))

    def close(self, link: Link, request: str, step: int) -> None:
        """Close a step on ``link``; tell the owners what is let go, once there are many."""
        link.close(request, step)
        if len(self._asks) < self.at_least:
            return
        gone: dict[tuple[str, int], list[tuple[int, int | None]]] = {}
        for _ in range(len(self._asks)):
            of, owner, number, at_step = self._asks.popleft()
            gone.setdefault((of, owner), []).append((number, at_step))
        for (of, owner), asks in gone.items():
            link.let_go(of, owner, asks)
