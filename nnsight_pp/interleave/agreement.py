"""The ranks of a tensor-parallel group stay at the same line of a block.

Note [Ranks agree after every turn]
    A value is joined by a collective, and a collective hangs when one rank comes to it and another
    does not. So after every turn of a worker, and around every call of a module, the ranks of its
    stage compare where the worker is now: the number and the checksum of its asks, what it is
    parked on, how it ended, and sums of what it wrote. The message has one size, so ranks that
    come to it from different places (one in a call, one at the end of its turn) still meet in it.
    Ranks that agree serve the same worker at the same place next, where they compare again: by
    induction no rank ever comes to a collective alone. Where nobody asks, nothing is compared.

    Workers that have their turns at one location are compared at once, when all have had theirs:
    most messages are alike, and one tells so. Where it differs, the ranks first say whether one of
    them is in a call, and whose: see Note [Who is in a call]. If none is, each worker is compared
    by itself.

    A value without a rule must be the same on each rank. The first time at its location it is
    compared before a block sees it, and refused where it differs. From then on its sums go along
    with the comparison after the turns. What blocks have made of one that differs stays in the rows
    of their own requests, and each of these ends, as if they had written different values.

    A worker whose ranks differ ends with `RankDivergenceError` on each of them, and is asked and
    compared no more: other requests do not notice. Workers whose blocks share names are compared
    as one, and end together.
"""

from __future__ import annotations

import enum
import zlib
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.tree import leaves
from nnsight_pp.errors import NotSupportedError, RankDivergenceError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut, JoinedValue, Joiner
    from nnsight_pp.interleave.worker import Worker

    # Who had a turn at one location, each with its cut of the value, if it was handed it.
    Turn = tuple[Worker, Cut | None]
    Turns = list[Turn] | None


class Point(enum.IntEnum):
    """Where in a block's run the ranks compare."""

    TURN = 1
    CALL = 2
    CALLED = 3
    FAILED = 4
    TURNS = 5


# Where a rank is that is not in a call.
_NOWHERE = -1


# What a difference in each of `_facts` means, in their order; one more for values.
_MEANINGS = (
    "one rank called a module where another went on",
    "they work on different requests",
    "they made different numbers of asks",
    "they asked for different values",
    "the block ended on one rank and goes on on another",
    "it raised different errors",
    "they wait for different things",
    "a failure outside of the block concerns one of them",
    "they wrote different values, were handed them, or called a module with different ones",
)


@final
class Agreement:
    """What one rank compares with the others of its tensor-parallel group.

    Args:
        joiner: Talks to the group. None: there is no other rank in it.
        where: Says in words where this rank is, for messages.
    """

    def __init__(self, joiner: Joiner | None, where: str) -> None:
        self._joiner = joiner
        self._where = where
        # Those that have their turns at one location now, in order; `after_turns` comes then.
        self.beside: Sequence[Worker] = ()

    def begin(self, workers: Sequence[Worker]) -> Turns:
        """Return where the turns of ``workers`` are noted; None if each is compared at its end."""
        if self._joiner is None or any(one.timeline is not None for one in workers):
            return None  # those that share names are compared in the middle of their turns
        self.beside = workers
        return []

    def end(
        self, turns: Sequence[Turn], joined: JoinedValue | None, value: Any
    ) -> Sequence[tuple[Worker, Any]]:
        """Compare the workers of ``turns``, with what they have left in ``value``.

        Returns:
            Those that are to be compared by themselves, each with what it has written.
        """
        pairs = [
            (worker, None if joined is None or cut is None else joined.written(cut, value))
            for worker, cut in turns
        ]
        workers = [worker for worker, _ in turns]
        are_alike = not turns or self.after_turns(workers, [it for _, it in pairs], joined)
        self.beside = ()
        return [one for one in pairs if not are_alike or one[0].apart_by is not None]

    def after_turns(
        self, workers: Sequence[Worker], written: Sequence[Any], joined: JoinedValue | None
    ) -> bool:
        """Compare ``workers``, of `beside`, after their turns; return whether all are alike.

        Not compared are those that are apart by now.

        Args:
            workers: Those that had a turn.
            written: Of each, its share of the value as it left it; None where it has not edited it.
            joined: The value that they were handed.
        """
        assert self._joiner is not None
        while True:
            left = [one for one in workers if one.apart_by is None]
            pairs = zip(workers, written, strict=True)
            edits = [(w, it) for w, it in pairs if it is not None and w.apart_by is None]
            facts = _facts(left, Point.TURNS, _checksum(worker.request for worker, _ in edits))
            values = [it for _, it in edits]
            most = self._joiner.num_compared // max(1, len(list(leaves(values[:1])))) or 1
            given = () if joined is None else joined.given
            if self._joiner.first_difference(facts, values[:most], given) is None:
                break
            if self._first_in_a_call(_NOWHERE) is None:
                return False
        if joined is not None:
            joined.are_alike()
        # All ranks have seen all turns to their ends now, and know of the same edits.
        return all(
            self._joiner.first_difference(facts, values[start : start + most]) is None
            for start in range(most, len(values), most)
        )

    def _first_in_a_call(self, own: int) -> Worker | None:
        """See Note [Who is in a call]; None where all ranks are at one place, which is ``own``.

        Returns:
            The worker that is apart now.
        """
        assert self._joiner is not None
        places = self._joiner.of_all(own)
        if all(place == own for place in places):
            return None
        first = self.beside[min(place for place in places if place != _NOWHERE)]
        self._apart(first, 0)
        return first

    def after_turn(
        self,
        worker: Worker,
        written: Any = None,
        joined: JoinedValue | None = None,
        *,
        has_failed: bool = False,
    ) -> RankDivergenceError | None:
        """Compare where ``worker`` is after its turn; return what ends it where the ranks differ.

        Args:
            worker: The worker, parked or ended.
            written: This request's share of the value that it was given, as it left it.
            joined: That value.
            has_failed: Whether its request failed outside of the block.
        """
        if self._joiner is None:
            return None
        if worker.apart_by is not None:  # found out in a call, and caught by the block
            return worker.apart_by
        facts = _facts(together(worker), Point.TURN, has_failed)
        given = () if joined is None else joined.given
        meaning = self._joiner.first_difference(facts, written, given)
        if meaning is not None:
            return self._apart(worker, meaning)
        if joined is not None:
            joined.are_alike()
        return None

    def without_worker(self, request: str) -> None:
        """Say that ``request`` could not even start here, so that the others end it too."""
        if self._joiner is not None:
            facts = (Point.TURN, _checksum([request]), 0, 0, 1, 0, 0, 1)
            self._joiner.first_difference(facts, None)

    def call(
        self, worker: Worker, location: Location, arguments: Any, run: Callable[[], Any]
    ) -> Any:
        """Return ``run()``, a call of a module, which every rank of the group makes together.

        Raises:
            RankDivergenceError: Another rank does not make this call, or with other arguments.
            NotSupportedError: The module gives each rank another value, and no rule joins them.
        """
        if self._joiner is None:
            return run()
        self._compare(worker, Point.CALL, arguments)
        try:
            result = run()
        except Exception:
            self._compare(worker, Point.FAILED, None)
            raise
        if self._compare(worker, Point.CALLED, result) is not None:
            raise NotSupportedError(
                explain(
                    f"The result of {location} is not the same on every tensor-parallel rank.",
                    where=worker.where(),
                    why="Each rank has a piece of it, and no rule says how they make one.",
                    todo="Call the module that holds this one.",
                    ran=self._where,
                )
            )
        return result

    def _compare(self, worker: Worker, point: Point, values: Any) -> int | None:
        """Compare inside a turn; return what differs where that is the result of a call."""
        assert self._joiner is not None
        if worker.apart_by is not None:
            raise worker.apart_by
        facts = _facts(together(worker), point)
        while (meaning := self._joiner.first_difference(facts, values)) is not None:
            if worker in self.beside:
                first = self._first_in_a_call(self.beside.index(worker))
                if first is worker and worker.apart_by is not None:
                    raise worker.apart_by
                if first is not None:
                    continue
            if point is Point.CALLED and meaning == len(facts):
                return meaning
            raise self._apart(worker, meaning)
        return None

    def _apart(self, worker: Worker, meaning: int) -> RankDivergenceError:
        """Return the error that ends ``worker``, on this rank as on the others."""
        error = RankDivergenceError(
            explain(
                "The tensor-parallel ranks went different ways in this block.",
                where=worker.where(),
                why=f"At or before this line {_MEANINGS[meaning]}. Every rank runs the block and "
                "must take the same branches, and make the same edits.",
                todo="Make the block independent of time, process ids, and set order.",
                ran=f"request {worker.request} | {self._where}",
            )
        )
        for one in together(worker):
            one.apart_by = error
            one.alone(error)
            if one.has_ended and one.error is None:
                one.error = error
        return error


def together(worker: Worker) -> Sequence[Worker]:
    """Return the workers that are compared as one: those whose blocks share names."""
    return (worker,) if worker.timeline is None else worker.timeline.workers


def _facts(workers: Sequence[Worker], point: Point, other: int = 0) -> tuple[float, ...]:
    """Return what must be the same on every rank, each a number below 2 ** 53."""
    errors = [type(one.error).__name__ for one in workers if one.error is not None]
    return (
        point,
        _checksum(one.request for one in workers),
        sum(one.asked for one in workers),
        _checksum(one.trail for one in workers),
        sum(one.has_ended for one in workers),
        _checksum(errors),
        _checksum(one.ask for one in workers),
        other,
    )


def _checksum(things: Iterable[object]) -> int:
    return zlib.crc32(" ".join(map(str, things)).encode())
