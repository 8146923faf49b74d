"""A worker's random numbers: its own, alike on every rank, and gone when it gives the turn back."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import pytest
import torch

from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import VisitClock
from nnsight_pp.interleave.draws import Draws, draws_of
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.randomness import Randomness
from nnsight_pp.interleave.worker import Worker


def drawn() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), random.random(), float(numpy.random.normal())


def drawing(seed: int) -> Randomness:
    return Randomness(seed, python=True, numpy=True)


def state() -> tuple[Any, ...]:
    name, keys, *rest = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest


def test_turns_continue_where_the_last_one_stopped_and_two_ranks_agree():
    one, other = drawing(7), drawing(7)
    found = []
    for own in (one, other, one, other):
        with own:
            found.append(drawn())
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


def test_the_driver_sees_no_default_dtype_of_a_block_that_may_not_leave_one():
    own, usual = drawing(7), torch.get_default_dtype()
    for dtype in (torch.float64, usual):
        with own:
            torch.set_default_dtype(dtype)
        assert torch.get_default_dtype() is usual
        left = own.left_dtype()
        assert (left is None) == (dtype is usual)
        with own:
            assert torch.get_default_dtype() is dtype
    with Randomness(7, python=False, numpy=False, dtype=torch.float64):
        assert torch.zeros(1).dtype is torch.float64
    assert torch.get_default_dtype() is usual


def test_the_driver_sees_no_draw_even_when_the_turn_ends_by_an_exception():
    numpy.random.normal()  # leaves the second of a pair behind, which belongs to the state
    before = state()
    with pytest.raises(KeyError), drawing(7):
        drawn()
        raise KeyError
    assert state() == before


def test_two_requests_draw_different_numbers_whatever_the_other_does():
    one, other, alone = drawing(1), drawing(2), drawing(1)
    found = []
    for _ in range(3):
        with one:
            found.append(drawn())
        with other:
            drawn()
            torch.manual_seed(0)
            random.seed(0)
    with alone:
        assert [drawn() for _ in range(3)] == found


def test_a_generator_that_is_not_exchanged_stays_the_process_own():
    before = state()
    with Randomness(7, python=False, numpy=False):
        torch.rand(1)
        random.random()
    assert state()[0] == before[0]
    assert state()[1] != before[1]


def test_a_worker_draws_its_own_numbers_over_its_turns_and_dies_without_a_trace():
    switch = thread_state.load()
    found: list[Any] = []

    def block() -> None:
        found.append(drawn())
        raise ValueError("over")

    for seed in (3, 3, 4):
        before = state()
        turns = Interleaver(VisitClock(), switch)
        worker = Worker("r", block, __file__, switch.new_slot(False), randomness=drawing(seed))
        turns.add(worker)
        assert isinstance(worker.error, ValueError)
        assert state() == before
    assert found[0] == found[1] != found[2]


# ---- which generators ------------------------------------------------------------------------


def noisy() -> float:
    return random.random()


def twice_removed() -> float:
    return noisy() + 1


@functools.lru_cache
def cached() -> float:
    return noisy()


def quiet(value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(value) * 2


class Noisy(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + random.random()


class Untouchable:
    """As a node of the model's tree: whoever looks at its attributes makes an ask."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


NONE, PYTHON, BOTH = Draws(False, False), Draws(True, False), Draws(True, True)


@pytest.mark.parametrize(
    ("source", "names", "wanted"),
    [
        ("x = model.layers[0].output * torch.rand(3)", {"torch": torch}, NONE),
        ("x = f(x)", {"f": quiet}, NONE),
        ("x = np.abs(x)", {"np": numpy}, NONE),
        ("x = node.output", {"node": Untouchable()}, NONE),
        ("x = random.random()", {"random": random}, PYTHON),
        ("from random import choice", {}, PYTHON),
        ("import random as dice", {}, PYTHON),
        ("x = dice.randint(1, 2)", {"dice": random}, PYTHON),
        ("x = choose(1, 2)", {"choose": random.randint}, PYTHON),
        ("x = choose()", {"choose": random.random}, PYTHON),
        ("x = f()", {"f": twice_removed}, PYTHON),
        ("x = f()", {"f": cached}, PYTHON),
        ("x = f()", {"f": functools.partial(noisy)}, PYTHON),
        ("x = fs[0]['f']()", {"fs": [{"f": noisy}]}, PYTHON),
        ("x = net(x)", {"net": torch.nn.Sequential(Noisy())}, PYTHON),
        ("def g():\n    return lambda: [random for _ in x]", {}, PYTHON),
        ("x = np.random.rand()", {"np": numpy}, BOTH),
        ("x = f()", {"f": numpy.random.rand}, BOTH),
        ("import numpy.random", {}, BOTH),
        ("x = eval(text)", {}, BOTH),
        ("x = f(numbers)", {"numbers": [[number] for number in range(30_000)]}, BOTH),
    ],
)
def test_what_a_block_may_draw_from(source: str, names: dict[str, Any], wanted: Draws):
    assert draws_of(compile(source, "block", "exec"), names) == wanted


def test_a_value_too_deep_to_look_through_counts_as_a_draw():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert draws_of(compile("x = deep", "block", "exec"), {"deep": deep}) == BOTH
