"""When a block has put something into what is around it."""

from __future__ import annotations

from typing import Any

from nnsight_pp.core.ask import BEHIND_ALL
from nnsight_pp.core.growth import UNKNOWN, Growth, dates_in
from nnsight_pp.core.location import Location
from nnsight_pp.interleave.worker import Mark

PLACE = Location("layers.0", "output")
START = Mark(-1, -1, None)


def test_each_item_is_dated_by_what_its_block_has_asked_for_before() -> None:
    growth, rows, counts = Growth(), ["old"], {"old": 0}
    growth.watch([rows, counts, rows])
    rows.append("at once")
    growth.note(START, 0)
    growth.note(Mark(0, 1, 4, PLACE), 0)
    rows.extend(["a", "b"])
    counts["a"] = 1
    growth.note(Mark(0, 1, 4, PLACE, 2), 3)
    rows.append("c")
    growth.note(Mark(2, 1, None, PLACE), 0)
    rows.append("d")
    growth.note(Mark(2, BEHIND_ALL, 0), 0)
    here = (0, 1, 4, 2, 3)
    end = (BEHIND_ALL, BEHIND_ALL, 0, 0, 0)
    found: Any = dates_in(growth.of(rows))
    assert found == [(-1, -1, -1, 0, 0), here, here, (2, 1, UNKNOWN, 0, 0), end]
    assert dates_in(growth.of(counts)) == [here]
    assert growth.of([]) == b""


def test_what_is_taken_out_again_has_no_date() -> None:
    growth, rows = Growth(), [0, 1]
    growth.watch([rows])
    rows.extend([2, 3])
    growth.note(START, 0)
    rows.pop()
    growth.note(START, 0)
    assert len(dates_in(growth.of(rows))) == 1
    rows.clear()
    growth.note(START, 0)
    assert growth.of(rows) == b""
