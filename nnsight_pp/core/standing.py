"""How far each stage is with a request: what a wait that ran out of time prints.

A grid of steps and stages. A step is closed on a stage when its forward is over there; who is
parked on what stands at the stage's last open step.

>>> ahead, behind = Standing(1, 1, 4, "parked on Step 2"), Standing(1, 0, 3, "waits")
>>> print(grid({0: ahead, 1: behind, 2: None}, 1))
       | stage 0                  | stage 1                      | stage 2
step 0 | closed                   | closed                       | no answer
step 1 | closed, parked on Step 2 | open, waits <-- waiting here | no answer
asks   | 4                        | 3                            |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# At most this many steps are printed, the last ones.
_MOST_STEPS = 6
_MARK = "<-- waiting here"


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one stage is with one request.

    Attributes:
        opened: The last step that it has begun, -1 before the first.
        closed: The last step whose forward is over there, likewise.
        asked: How many asks its block has made.
        doing: What its block does now, in words.
    """

    opened: int
    closed: int
    asked: int
    doing: str


def grid(standings: Mapping[int, Standing | None], waiting: int) -> str:
    """Return the steps of a request on each stage, as a table.

    Args:
        standings: By stage; None for one that did not answer.
        waiting: The stage whose wait has run out of time.
    """
    known = [one for one in standings.values() if one is not None]
    last = max((max(one.opened, 0) for one in known), default=0)
    # The steps that are over everywhere tell nothing, but for the last of them.
    first = min((one.closed for one in known), default=0)
    steps = range(max(0, min(first, last), last - _MOST_STEPS + 1), last + 1)
    columns = [["", *(f"step {step}" for step in steps), "asks"]]
    for stage, one in sorted(standings.items()):
        column = [f"stage {stage}"]
        column += [_cell(one, step, is_waiting=stage == waiting) for step in steps]
        columns.append([*column, "" if one is None else str(one.asked)])
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    )


def _cell(one: Standing | None, step: int, *, is_waiting: bool) -> str:
    if one is None:
        return "no answer"
    begun = "closed" if step <= one.closed else "open"
    words = begun if step <= one.opened else "not begun"
    if step != max(one.opened, 0):
        return words
    mark = f" {_MARK}" if is_waiting else ""
    return f"{words}, {one.doing}{mark}"
