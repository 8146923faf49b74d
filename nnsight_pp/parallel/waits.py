"""What a wait for another stage prints when its time has run out: how far every stage is.

The stages are asked over the link, whose threads answer whatever the forward does. One whose
threads stand still as well has "no answer" in its column.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.location import Location
from nnsight_pp.core.standing import Standing, grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nnsight_pp.parallel.pending import PendingAnswer

# How long the stages have, all together, to say how far they are.
_BOUND_S = 2.0
_STANDING = Location("", "standing")


def report(
    pull: Callable[..., PendingAnswer],
    request: str,
    own: tuple[int, Standing | None],
    peers: Iterable[int],
    wait: str,
) -> str:
    """Return how far the stages are with ``request``, as a table.

    Args:
        pull: That of the link of the stage whose wait has run out of time.
        request: What it is about.
        own: That stage, and how far it is.
        peers: The other stages.
        wait: What was waited for, in words.
    """
    stage, mine = own
    if mine is None:
        mine = Standing(-1, -1, 0, "")
    standings: dict[int, Standing | None] = {stage: replace(mine, doing=wait)}
    key = AskKey(request, -1)
    asked = {peer: pull(key, peer, _STANDING, 0, (), "standing") for peer in peers}
    deadline = time.monotonic() + _BOUND_S
    for peer, pending in asked.items():
        answer = pending.answer_within(deadline - time.monotonic())
        is_told = answer is not None and answer.kind == "value"
        standings[peer] = answer.value if answer is not None and is_told else None
    return grid(standings, stage)
