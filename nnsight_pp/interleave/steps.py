"""Loops over steps: `tracer.iter[...]` and `tracer.all()`.

A loop pins what its body asks for to one step after the other. On an engine each turn waits at the
step gate, so the engine paces the loop and every rank makes the same number of turns. A loop that
outruns the run is cut (see `interleave.unwind`).
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, final

from nnsight_pp.errors import BlockError, explain
from nnsight_pp.interleave.worker import current_worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Selection = int | slice | list[int] | tuple[int, ...]


def _numbers(selection: Selection) -> Iterable[int]:
    """Return the steps that ``selection`` names, in order."""
    if isinstance(selection, slice):
        start = _number(selection.start or 0)
        stride = _number(1 if selection.step is None else selection.step)
        if stride == 0:
            raise ValueError("the stride of `tracer.iter[a:b:stride]` must not be zero")
        if selection.stop is None:
            return count(start, stride)
        return range(start, _number(selection.stop), stride)
    if isinstance(selection, (list, tuple)):
        return [_number(item) for item in selection]
    return [_number(selection)]


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`tracer.iter[...]` takes an int, a slice or a list of ints, not {value!r}"
        )
    if value < 0:
        raise ValueError(
            explain(
                f"`tracer.iter[...]` was given the negative step {value}.",
                why="How many steps a run has is known only when it ends.",
                todo="Count steps from 0.",
            )
        )
    return value


@final
class Steps:
    """What `tracer.iter` returns: index it to choose steps, or loop over it for all of them."""

    __slots__ = ()

    def __getitem__(self, selection: Selection) -> Iterator[int]:
        """Loop over the steps of ``selection``; without an end, until the run ends."""
        return _loop(_numbers(selection))

    def __iter__(self) -> Iterator[int]:
        return self[:]


def _loop(numbers: Iterable[int]) -> Iterator[int]:
    worker = current_worker("`tracer.iter`")
    turns = worker.turns
    assert turns is not None
    previous = worker.step
    worker.loop_depth += 1
    try:
        asked = -1
        for number in numbers:
            if isinstance(numbers, count) and worker.asked == asked and not turns.has_gate(worker):
                raise _endless()
            asked = worker.asked
            turns.begin_step(worker, number)
            yield number
    finally:
        worker.loop_depth -= 1
        turns.restore_step(worker, previous)


def _endless() -> BlockError:
    return BlockError(
        explain(
            "A loop over all steps asked for nothing in one of its turns.",
            why="On this engine a loop is paced by the values it reads: it would never end.",
            todo="Read or write a value in every turn, or give the loop an end.",
        )
    )
