"""When a block has put something into a list or a dict: behind which value of the model.

Blocks of several requests work on copies of what is around them. In one process, what they put into
one list stands there in the order in which the model computes what they have asked for. So each
item is dated where it is put, and the client brings what all of them have put into that order.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, final

from nnsight_pp.core.ask import BEHIND_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable

# For a position: it is not known.
UNKNOWN = -2


class Date(NamedTuple):
    """What a block had asked for last.

    Attributes:
        step: The step of that.
        stage: The stage that computes it; behind all of them, the result of a request.
        position: Its place in that stage's forward, or `UNKNOWN`.
        times: How often the block had asked for something at that very place before.
        seat: The block's place among those of the run, which the model serves in that order.
    """

    step: int
    stage: int
    position: int
    times: int
    seat: int


_SIZE = len(Date._fields)


@final
class Growth:
    """The lists and dicts of one piece of blocks, and when each of their new items was put."""

    __slots__ = ("_dates", "_held", "_lengths")

    def __init__(self) -> None:
        # By id, which stays as long as the container is held.
        self._held: dict[int, Any] = {}
        self._dates: dict[int, list[Date]] = {}
        self._lengths: list[int] = []

    def watch(self, containers: Iterable[Any]) -> None:
        """Date from now on what comes into these ``containers``."""
        for one in containers:
            if id(one) not in self._held:
                self._held[id(one)], self._dates[id(one)] = one, []
                self._lengths.append(len(one))

    def note(self, mark: Any, seat: int) -> None:
        """Date what has come in since: behind ``mark``, a `Mark` of a worker.

        Cost: a look at the length of each of them.
        """
        lengths = list(map(len, self._held.values()))
        if lengths == self._lengths:
            return
        is_end = mark.stage >= BEHIND_ALL  # of the whole run, whatever step the block was in
        position = UNKNOWN if mark.position is None and mark.place is not None else mark.position
        step = BEHIND_ALL if is_end else mark.step
        date = Date(step, mark.stage, -1 if position is None else position, mark.times, seat)
        for dates, now, before in zip(self._dates.values(), lengths, self._lengths, strict=True):
            if now > before:
                dates += [date] * (now - before)
            elif now < before:
                del dates[max(0, len(dates) - (before - now)) :]
        self._lengths = lengths

    def of(self, container: Any) -> bytes:
        """Return when each of the new items of ``container`` was put, for `dates_in`."""
        dates = self._dates.get(id(container), ())
        return array("q", [number for one in dates for number in one]).tobytes()


def dates_in(data: bytes) -> list[Date]:
    """Return what `Growth.of` has written."""
    numbers = array("q")
    numbers.frombytes(data)
    return [Date(*numbers[at : at + _SIZE]) for at in range(0, len(numbers), _SIZE)]
