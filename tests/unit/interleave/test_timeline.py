"""Blocks that share names, on one to four stages: the lines run in the order of one process.

`NNSIGHT_PP_SIMULATION=SEED:RUNS` runs more random ones, e.g. `1000:5000`.
"""

from __future__ import annotations

import os
import random
import textwrap

import pytest

from fakes.pipeline import Outcome, Pipeline, Request
from fakes.programs import program

SEED, _, RUNS = os.environ.get("NNSIGHT_PP_SIMULATION", "0:80").partition(":")
CHUNK = 20


def run(num_stages: int, requests: list[Request], seed: int = 1) -> dict[str, Outcome]:
    pipeline = Pipeline(num_stages, seed)
    found = pipeline.run(requests)
    assert pipeline.rest() == {}
    return found


def company(*blocks: str, most_steps: int = 1) -> list[Request]:
    return [
        Request(
            f"r{index}",
            textwrap.indent("out = []\n" + textwrap.dedent(block), "    "),
            5 + index,
            2 + index,
            most_steps,
            company="one",
        )
        for index, block in enumerate(blocks)
    ]


def seen(found: dict[str, Outcome], company: str = "") -> object:
    """Return what a user sees: a failed block takes those along that share names with it."""
    errors = {name: outcome.error for name, outcome in found.items() if outcome.error is not None}
    return "failed" if errors else {name: outcome.seen() for name, outcome in found.items()}


def requests(seed: int, *, calls: float) -> list[Request]:
    chance = random.Random(f"company {seed}")
    return [
        Request(
            name=f"r{index}",
            source=program(
                seed * 10 + index,
                mischief=chance.choice([0.0, 0.0, 0.0, 0.0, 0.1]),
                shared=chance.choice([0.2, 0.4]),
                calls=calls,
            ),
            token=chance.randint(1, 10),
            num_rows=chance.randint(1, 3),
            most_steps=chance.randint(1, 4),
            company="one",
        )
        for index in range(chance.randint(2, 3))
    ]


def check(seed: int, *, calls: float = 0.0) -> tuple[int, int]:
    """Return how many of the runs failed on one stage, and how many on more stages only."""
    given = requests(seed, calls=calls)
    alone = [Request("alone", program(seed), 3, 2, 2)]
    num_refused = 0
    try:
        wanted = run(1, [*given, *alone], seed)
        for num_stages in (2, 3, 4):
            found = run(num_stages, [*given, *alone], seed)
            assert found.pop("alone").seen() == wanted["alone"].seen(), f"alone on {num_stages}"
            before = {name: one for name, one in wanted.items() if name != "alone"}
            if calls and seen(found) == "failed":
                num_refused += seen(before) != "failed"
            else:
                assert seen(found) == seen(before), f"on {num_stages} stages"
    except BaseException as error:
        error.add_note(f"\nseed {seed}, calls {calls}")
        for request in given:
            what = f"{request.num_rows} rows, {request.most_steps} steps"
            error.add_note(f"{request.name} ({what}):\n{request.source}")
        raise
    return seen(before) == "failed", num_refused


@pytest.mark.slow
@pytest.mark.parametrize("first", range(int(SEED), int(SEED) + int(RUNS), CHUNK))
def test_random_blocks_that_share_names_give_the_same_on_every_number_of_stages(first: int):
    seeds = range(first, min(first + CHUNK, int(SEED) + int(RUNS)))
    num_failed = sum(check(seed)[0] for seed in seeds)
    assert num_failed < 0.8 * len(seeds), "most were refused, so it showed little"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(int(SEED), int(SEED) + int(RUNS) // 2, CHUNK))
def test_random_blocks_with_calls_give_the_same_or_are_refused(first: int):
    for seed in range(first, min(first + CHUNK, int(SEED) + int(RUNS))):
        check(seed, calls=0.15)


NAMED = {
    "a value of one is put into the other, early and late": (
        """
        early = L[0].output
        late = L[4].output
        """,
        """
        h = L[0].output
        h[-1] = early[-1]
        h = L[4].output
        h[-1] = late[0]
        out.append(model.logits)
        """,
    ),
    "two exchange a value at one layer": (
        """
        h = L[2].output
        one = h.clone()
        barrier()
        h[-1] = two[0]
        out.append(model.logits)
        """,
        """
        h = L[2].output
        two = h.clone()
        barrier()
        L[2].output = h * 2 + one[-1]
        out.append(model.logits)
        """,
    ),
    "what is bound before and after a late value": (
        """
        n = 1
        L[4].output
        n = 2
        """,
        """
        L[2].output
        out.append(n)
        L[4].input
        out.append(n)
        L[4].output
        out.append(n)
        """,
    ),
    "a number of a late value is looked at by a later layer's block": (
        """
        n = float(L[3].output[0].sum())
        bag.append(n)
        """,
        """
        h = L[4].output
        out.append(list(bag))
        h[-1] = n % 7
        out.append(model.logits)
        """,
    ),
    "a served value is edited by the block beside": (
        """
        h = L[1].output
        model.logits
        """,
        """
        L[1].output
        h[0][-1] = 3.0
        out.append(model.logits)
        """,
    ),
    "one ends before the other, and its values are used at the next step": (
        """
        v = L[4].output
        """,
        """
        for s in steps[:]:
            h = L[0].output
            if s: h[-1] += v[-1]
            model.logits
            out.append(v[0])
        """,
    ),
    "both loop, and the later one uses what the earlier one has of this step": (
        """
        for s in steps[:]:
            m = L[3].output[0]
            bag.append(m[-1])
        """,
        """
        for s in steps[:]:
            h = L[4].output
            out.append(len(bag))
            h[-1] += m[-1]
            out.append(model.samples[0])
        """,
    ),
    "an earlier block takes what a later one binds": (
        """
        h = L[4].output
        h[-1] += y[-1]
        out.append(model.logits)
        """,
        """
        y = L[3].output[0]
        """,
    ),
    "the results are the last": (
        """
        a = result()
        """,
        """
        b = result()
        out.append(a)
        """,
    ),
    "a call's result is handed over": (
        """
        y = L[4](L[1].output[0])
        """,
        """
        h = L[4].output
        h[-1] += y[-1]
        out.append(model.logits)
        """,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_blocks_give_the_same_on_every_number_of_stages(name: str):
    for most_steps in (1, 3):
        given = company(*NAMED[name], most_steps=most_steps)
        if name.startswith("one ends"):
            given[0].most_steps = 1
        found = {n: seen(run(n, given)) for n in (1, 2, 3, 4)}
        assert found[1] != "failed"
        assert found[2] == found[3] == found[4] == found[1]
        assert any(saved for saved, _ in found[1].values()), "it showed nothing"


# With the error of the block that is to blame.
REFUSED = {
    "a late value is put into an early layer": (
        ("v = L[4].output", "h = L[0].output\nh[-1] = v[-1]"),
        "NameError",
    ),
    "a barrier that nobody else comes to": (("barrier()", "L[0].output"), "BarrierError"),
    "a barrier opens when the model has passed the layer": (
        ("barrier()\nL[1].output", "L[3].output\nbarrier()"),
        "OutOfOrderError",
    ),
    "a value is edited after the barrier opened too late": (
        ("h = L[0].output\nbarrier()\nh[:] = 1.0", "L[3].output\nbarrier()"),
        "OutOfOrderError",
    ),
    "a block raises": (("L[1].output\nraise KeyError", "out.append(L[4].output)"), "KeyError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_process_cannot_do_is_refused_on_every_number_of_stages(name: str):
    blocks, error = REFUSED[name]
    for num_stages in (1, 2, 3, 4):
        found = run(num_stages, company(*blocks))
        assert seen(found) == "failed"
        assert error in {one.error[0] for one in found.values() if one.error is not None}


def test_a_call_that_runs_later_in_the_step_is_refused():
    blocks = ("y = L[4](L[0].output)\nout.append(float(y.sum()))", "out.append(L[1].output)")
    assert seen(run(1, company(*blocks))) != "failed"
    for num_stages in (2, 3):
        found = run(num_stages, company(*blocks))
        assert found["r0"].error is not None
        assert found["r0"].error[0] == "OutOfOrderError"
