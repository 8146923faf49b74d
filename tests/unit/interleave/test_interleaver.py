"""The rules of the interleaver, one situation each, on one stage or on the second of three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight_pp.core.location import LOGITS, RESULT, Location
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.errors import BlockError, OutOfOrderError, OutsideTraceError, RowsError
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import StepClock, VisitClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.steps import Steps
from nnsight_pp.interleave.worker import Worker, current_worker
from nnsight_pp.parallel.owners import StageMap

A, B, C = (Location(f"model.{name}", "output") for name in "abc")
ORDER = ["model.a", "model.b", "model.c"]


def read(location: Location) -> Any:
    worker = current_worker(location)
    return worker.turns.read(worker, location)


def write(location: Location, value: Any) -> None:
    worker = current_worker(location)
    worker.turns.write(worker, location, value)


class OneStage:
    """An engine's rank that owns everything; `model.a`, `model.b`, `model.c` run in this order."""

    def __init__(self, block: Callable[[list[Any]], None], *, with_order: bool = True) -> None:
        owners = StageMap(
            [ORDER], [ORDER], [*ORDER, "model.ghost"], order=[[A, B, C]] if with_order else ()
        )
        switch = thread_state.load()
        self.turns = Interleaver(StepClock(), switch, owners=owners)
        self.out: list[Any] = []
        self.worker = Worker("r", lambda: block(self.out), __file__, switch.new_slot(False))
        self.turns.add(self.worker)

    def step(self, number: int) -> torch.Tensor:
        """Run one step: the value starts at ``number`` and each location adds one."""
        self.turns.catch_up("r")
        self.turns.open_step("r", number)
        self.worker.cut = WholeCut()
        value = torch.full((2,), float(number))
        for location in (A, B, C, LOGITS):
            value = self.turns.serve(location, value + 1)
        self.worker.cut = None
        self.turns.close_step("r", number)
        return value

    def run(self, num_steps: int = 1, result: Any = None) -> OneStage:
        for number in range(num_steps):
            self.last = self.step(number)
        self.turns.finish("r", result)
        self.turns.drop("r")
        assert self.turns.statistics() == {"requests": 0, "workers": 0, "parked": 0}
        return self


def test_an_error_that_other_stages_cannot_see_ends_the_block_even_when_it_is_caught():
    def block(out: list[Any]) -> None:
        try:
            read(Location("model.ghost", "output"))
        except OutOfOrderError:
            out.append("caught")

    rank = OneStage(block).run()
    assert rank.out == ["caught"]
    assert isinstance(rank.worker.error, OutOfOrderError)
    assert "caught this error" in rank.worker.error.__notes__[0]
    assert not rank.worker.is_echo


def test_an_ask_against_the_known_order_is_refused_at_once_and_may_be_caught():
    def block(out: list[Any]) -> None:
        out.append(float(read(B)[0]))
        try:
            read(A)
        except OutOfOrderError:
            out.append("caught")
        out.append(float(read(C)[0]))

    rank = OneStage(block).run()
    assert rank.worker.error is None
    assert rank.out == [2.0, "caught", 3.0]


def test_a_refused_ask_leaves_the_window_of_the_last_value_open():
    def block(out: list[Any]) -> None:
        value = read(B)
        with pytest.raises(OutOfOrderError):
            read(A)
        value += 10
        write(B, value * 2)

    assert OneStage(block).run().last.tolist() == [26.0, 26.0]


def test_without_a_known_order_the_owner_decides_and_the_error_stays():
    def block(out: list[Any]) -> None:
        read(B)
        try:
            read(A)
        except OutOfOrderError:
            out.append("caught")

    rank = OneStage(block, with_order=False).run()
    assert isinstance(rank.worker.error, OutOfOrderError)


def test_a_write_whose_window_is_closed_is_refused_and_not_lost():
    def block(out: list[Any]) -> None:
        read(B)
        try:
            read(RESULT)
        finally:
            write(B, torch.zeros(2))

    rank = OneStage(block).run()
    assert isinstance(rank.worker.error, OutOfOrderError)


def test_leaving_a_loop_early_keeps_the_window_open():
    def block(out: list[Any]) -> None:
        for _ in Steps()[:2]:
            value = read(B)
            break
        value += 10

    assert OneStage(block).run().last.tolist() == [14.0, 14.0]


def test_a_commit_that_fails_after_a_loop_was_left_is_not_swallowed():
    class Refusing(WholeCut):
        def put(self, value: Any, served: Any, marks: Any, *, assigned: bool) -> Any:
            if assigned:
                raise RowsError("no")
            return value

    def block(out: list[Any]) -> None:
        for _ in Steps()[:2]:
            write(B, torch.zeros(2))
            current_worker("").visit._cut = Refusing()
            break
        read(C)

    assert isinstance(OneStage(block).run().worker.error, RowsError)


def test_nothing_can_be_asked_for_after_the_result():
    def block(out: list[Any]) -> None:
        out.append(read(RESULT))
        read(C)

    rank = OneStage(block).run(result="text")
    assert rank.out == ["text"]
    assert isinstance(rank.worker.error, OutOfOrderError)


def test_an_open_loop_ends_with_the_request():
    def block(out: list[Any]) -> None:
        for step in Steps():
            value = float(read(A)[0])
            out += [(step, value)]
        out.append("never")

    rank = OneStage(block).run(3)
    assert rank.out == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert rank.worker.error is None
    assert "never reached" in rank.worker.warnings[0]


def test_a_block_that_catches_everything_is_given_up():
    def block(out: list[Any]) -> None:
        while True:
            try:
                for _ in Steps()[len(out) + 5 :]:
                    pass
            except BaseException:
                out.append(0)
                if len(out) > 300:
                    raise

    rank = OneStage(block)
    rank.step(0)
    rank.turns.finish("r")
    rank.turns.drop("r")
    assert rank.turns.statistics() == {"requests": 0, "workers": 0, "parked": 0}


def test_a_failed_worker_is_forgotten_with_its_request():
    def block(out: list[Any]) -> None:
        raise ValueError

    rank = OneStage(block)
    assert rank.turns.failed is rank.worker
    rank.run()
    assert rank.turns.failed is None


def test_steps_and_trails_are_counted_alike_for_the_same_asks():
    def block(out: list[Any]) -> None:
        for _ in Steps()[:2]:
            read(A), read(A), read(C)

    one, other = OneStage(block).run(2), OneStage(block, with_order=False).run(2)
    assert one.worker.asked == 4
    assert one.worker.trail == other.worker.trail != 0


# ------------------------------------------------------------------- in one process


def local(block: Callable[[list[Any]], None], values: list[Location]) -> tuple[Worker, list[Any]]:
    switch = thread_state.load()
    turns = Interleaver(VisitClock(), switch)
    out: list[Any] = []
    worker = Worker("r", lambda: block(out), __file__, switch.new_slot(False))
    worker.cut = WholeCut()
    turns.add(worker)
    for number, location in enumerate(values):
        turns.serve(location, torch.full((2,), float(number)))
    turns.finish("r")
    turns.drop("r")
    assert turns.statistics()["parked"] == 0
    return worker, out


def test_in_one_process_an_ask_for_what_has_passed_is_refused_at_once():
    def block(out: list[Any]) -> None:
        read(B)
        try:
            read(A)
        except OutOfOrderError:
            out.append("caught")
        out.append(float(read(C)[0]))

    worker, out = local(block, [A, B, C])
    assert worker.error is None
    assert out == ["caught", 2.0]


def test_an_open_loop_that_asks_for_nothing_is_refused():
    def block(out: list[Any]) -> None:
        for _ in Steps()[:]:
            out += [0]

    worker, out = local(block, [A])
    assert isinstance(worker.error, BlockError)
    assert out == [0]


def test_a_value_is_asked_for_by_its_own_worker_only():
    with pytest.raises(OutsideTraceError):
        current_worker("x")
