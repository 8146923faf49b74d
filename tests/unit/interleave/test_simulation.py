"""Random blocks on the real classes, on one to four stages: the same values, and nothing stuck.

`NNSIGHT_PP_SIMULATION=SEED:RUNS` runs more of them, e.g. `1000:5000`.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import numpy
import pytest
import torch

from fakes.pipeline import Outcome, Pipeline, Request
from fakes.programs import program

SEED, _, RUNS = os.environ.get("NNSIGHT_PP_SIMULATION", "0:120").partition(":")
CHUNK = 20
REFUSED = "OutOfOrderError"


class Kind(NamedTuple):
    """What the programs of a run may hold beside reads, edits and writes."""

    calls: float = 0.0
    draws: float = 0.0


def requests(seed: int, kind: Kind) -> list[Request]:
    chance = random.Random(f"requests {seed}")
    return [
        Request(
            name=f"r{index}",
            source=program(
                seed * 10 + index,
                mischief=chance.choice([0.0, 0.0, 0.08, 0.25]),
                calls=kind.calls,
                draws=kind.draws,
            ),
            token=chance.randint(1, 10),
            num_rows=chance.randint(1, 3),
            most_steps=chance.randint(1, 4),
            is_drawing=kind.draws > 0,
        )
        for index in range(chance.randint(1, 4))
    ]


def run(num_stages: int, seed: int, given: list[Request], *, has_calls: bool) -> dict[str, Outcome]:
    """Run ``given``; ``seed`` decides on batches, delays, and what is known of the order."""
    pipeline = Pipeline(num_stages, seed, with_order=seed % 5 != 0, opens_early=not has_calls)
    found = pipeline.run(given)
    assert pipeline.rest() == {}
    return found


def check(seed: int, kind: Kind) -> int:
    """Return how many blocks were refused because a call came too late."""
    given = requests(seed, kind)
    num_refused = 0
    has_calls = kind.calls > 0
    try:
        wanted = run(1, seed, given, has_calls=has_calls)
        for num_stages in (2, 3, 4):
            found = run(num_stages, seed, given, has_calls=has_calls)
            for name, outcome in wanted.items():
                if has_calls and is_refused_for_a_call(found[name]):
                    num_refused += 1
                else:
                    text = f"{name} on {num_stages} stages"
                    assert found[name].seen() == outcome.seen(), text
        if has_calls:
            again = run(3, seed + 5_000_000, given, has_calls=True)
            found = run(3, seed, given, has_calls=True)
            for name, outcome in found.items():
                assert again[name].seen() == outcome.seen(), f"{name} with other delays"
    except BaseException as error:
        error.add_note(f"\nseed {seed}, {kind}")
        for request in given:
            lines = enumerate(request.source.splitlines(), start=2)
            text = "\n".join(f"{number:4d} {line}" for number, line in lines)
            error.add_note(f"{request.name} ({request.num_rows} rows, token {request.token}, "
                           f"{request.most_steps} steps):\n{text}")  # fmt: skip
        raise
    return num_refused


def is_refused_for_a_call(outcome: Outcome) -> bool:
    """Whether a stage waited for a call beyond its forward, and its block then came too late."""
    return outcome.was_held_up and outcome.error is not None and outcome.error[0] == REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("first", range(int(SEED), int(SEED) + int(RUNS), CHUNK))
def test_random_blocks_give_the_same_on_every_number_of_stages(first: int):
    for seed in range(first, min(first + CHUNK, int(SEED) + int(RUNS))):
        check(seed, Kind())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(int(SEED), int(SEED) + int(RUNS) // 2, CHUNK))
def test_random_blocks_with_calls_give_the_same_or_are_refused(first: int):
    seeds = range(first, min(first + CHUNK, int(SEED) + int(RUNS)))
    num_refused = sum(check(seed, Kind(calls=0.2)) for seed in seeds)
    num_blocks = sum(3 * len(requests(seed, Kind())) for seed in seeds)
    assert num_refused < 0.7 * num_blocks, "most were refused, so it showed little"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(int(SEED), int(SEED) + int(RUNS) // 4, CHUNK))
def test_random_blocks_draw_the_same_numbers_on_every_number_of_stages(first: int):
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    for seed in range(first, min(first + CHUNK, int(SEED) + int(RUNS))):
        check(seed, Kind(draws=0.2, calls=0.1 * (seed % 2)))
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


NAMED = {
    "a later stage's value is used after the result": """
        v = L[4].output
        out.append(result())
        out.append(float(v.sum()))
""",
    "a branch on the logits of the last step, then its samples": """
        for s in steps[:]:
            if float(model.logits.sum()) > 0:
                out.append(model.samples[0])
""",
    "a late value changes an early layer at the next step": """
        for s in steps[:]:
            if s:
                L[0].output += v[-1]
            v = L[4].output
            out.append(v[-1])
""",
    "an early value is forced and the late layer written in the same window": """
        early = L[0].output
        late = L[4].output
        late[-1] += float(early.sum()) % 7
        L[4].output = late * 2
        out.append(L[4].output[-1])
""",
    "a copy before the block's own edit is used elsewhere": """
        h = L[0].output
        before = h.clone()
        h[:] = 0
        L[4].output = L[4].output + before[-1]
        out.append(before)
        out.append(h)
""",
    "a refused ask leaves the window open and may be caught": """
        h = L[3].output
        try:
            L[1].output
        except OutOfOrderError:
            out.append('caught')
        h[0][:] = 1.0
        out.append(L[4].output)
""",
    "a call's first input is assigned and edited": """
        v = L[0].output
        L[3].input = v
        L[3].input[-1] = 5.0
        out.append(v)
        out.append(L[3].output[0])
""",
    "the length of a loop depends on a remote value": """
        out.append('start')
        for s in steps[:]:
            if int(L[4].output[-1][0]) % 3 == 0:
                break
            out.append(s)
        for s in steps[s + 1:]:
            out.append(L[2].output[-1])
""",
    "a call of an early layer takes a late value": """
        y = L[0](L[4].output)
        out.append(y[-1])
        out.append(float(y.sum()))
""",
    "a call in an open visit changes the value of the visit": """
        h = L[4].output
        h[-1] += L[4](h)[-1]
        out.append(L[4].output[-1])
""",
    "an early layer's call changes a late layer": """
        y = L[0](L[0].output)
        h = L[4].output
        h[-1] += y[-1]
        out.append(h)
""",
    "an edit of the argument comes after the call": """
        h = L[0].output
        y = L[4](h)
        h[:] = 0
        out.append(y)
        out.append(h)
""",
    "a late layer's call is used at the next step": """
        for s in steps[:]:
            if s:
                L[0].output += y[-1]
            y = L[4](L[0].output if not s else L[2].output)
            out.append(s)
""",
    "an early layer's call holds every stage up until the next step": """
        for s in steps[:]:
            out.append(L[0].output[-1])
            y = L[0](model.logits[:, :3])
            out.append(float(y.sum()))
""",
    "every layer's weight is edited, used and kept": """
        w = [L[i].weight for i in range(5)]
        w[0][:] = 1.0
        h = L[2].output
        h[-1] += w[4][0] + w[0][1] * w[1][1]
        out.extend(w)
        out.append(L[0].weight)
        out.append(float(L[3].weight.sum()))
""",
    "a stage falls behind where it has nothing to serve": """
        for s in steps[:]:
            y = L[2](model.logits[:, :3])
            out.append(L[0](y))
            out.append(model.samples[0])
""",
    "a weight is edited with a value of another stage and kept": """
        late, early = L[4].weight, L[0].weight
        late += L[0].output[-1]
        early[-1] = L[4].output[-1]
        out.append(late)
        out.append(early[-1])
""",
    "a weight is the argument of a call": """
        out.append(L[0](L[4].weight))
        out.append(L[4](L[0].weight)[-1])
""",
    "a lens reads every layer through the last one": """
        for i in range(5):
            h = L[i].output[0] if i % 2 else L[i].output
            out.append(L[4](h)[-1])
""",
    "numbers are drawn between calls, and into another stage's value": """
        for s in steps[:]:
            h = L[0].output
            y = L[4](h)
            h[-1].random_(0, 9)
            out.append(torch.randint(0, 99, (2,)))
            late = L[4].output
            late.random_(0, 9)
            out.append(late[-1])
            out.append(random.randint(0, 99))
            out.append(int(numpy.random.randint(0, 99)))
            out.append(y)
""",
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("most_steps", [1, 3])
def test_named_blocks_give_the_same_on_every_number_of_stages(name: str, most_steps: int):
    found = {n: outcome_of(NAMED[name], n, most_steps).seen() for n in (1, 2, 3, 4)}
    assert found[2] == found[3] == found[4] == found[1]
    assert len(found[1][0]) > 0, "it saved nothing, so it showed nothing"
    assert isinstance(found[1][0], list), f"it failed: {found[1]}"


def outcome_of(block: str, num_stages: int, most_steps: int, seed: int = 1) -> Outcome:
    is_drawing = "rand" in block
    request = Request("r", "        out = []" + block, 5, 2, most_steps, is_drawing)
    pipeline = Pipeline(num_stages, seed)
    found = pipeline.run([request])["r"]
    assert pipeline.rest() == {}
    return found


# With the numbers of stages on which they are refused: a call is waited for beyond its forward.
TOO_LATE = {
    "a late layer's call changes the early visit that it was made in": (
        """
        h = L[0].output
        h[-1] += L[4](h)[-1]
        out.append(h)
""",
        {2, 3, 4},
    ),
    "a late layer's call is assigned to the early visit that it was made in": (
        """
        h = L[0].output
        L[0].output = L[4](h)
        out.append(h)
""",
        {2, 3, 4},
    ),
    "the early visit is edited after the wait, in the last line": (
        """
        h = L[0].output
        out.append(float(L[4](h).sum()))
        h[-1] = 0.0
""",
        {2, 3, 4},
    ),
    "a late layer's call is forced before an early layer is read": (
        """
        out.append(float(L[4](L[0].output).sum()))
        out.append(L[1].output[0])
""",
        {2, 3, 4},
    ),
    "a middle layer's call waits for the logits, and an early layer is read in every step": (
        """
        for s in steps[:]:
            out.append(L[0].output[-1])
            out.append(float(L[2](model.logits[:, :3]).sum()))
""",
        {3, 4},
    ),
    "the refusal is caught, and the block asks on": (
        """
        for s in steps[:]:
            try:
                out.append(L[0].output[-1])
            except OutOfOrderError:
                out.append(float(L[4](L[0].weight).sum()))
            out.append(float(L[2](model.logits[:, :3]).sum()))
""",
        {3, 4},
    ),
}


@pytest.mark.parametrize("name", TOO_LATE)
def test_a_call_that_comes_too_late_is_refused_and_never_gives_another_value(name: str):
    block, refused = TOO_LATE[name]
    wanted = outcome_of(block, 1, 3)
    assert wanted.error is None
    for num_stages in (2, 3, 4):
        found = [outcome_of(block, num_stages, 3, seed) for seed in (1, 2, 3)]
        assert found[0].seen() == found[1].seen() == found[2].seen()
        if num_stages in refused:
            assert is_refused_for_a_call(found[0])
        else:
            assert found[0].seen() == wanted.seen()


FAILING = {
    "a call raises on its stage, before a line that raises on all": """
        L[4](torch.ones(2, 2))
        raise KeyError
""",
    "the error of a call is caught": """
        try:
            L[4](torch.ones(2, 2))
        except ValueError:
            out.append("caught")
        out.append(L[4].output)
""",
    "the error of a call is met where its result is forced": """
        h = L[0].output
        y = L[4](h[:, :2])
        out.append(float(y.sum()))
""",
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_in_a_call_is_the_error_of_the_block(name: str):
    found = [outcome_of(FAILING[name], num_stages, 2) for num_stages in (1, 2, 3, 4)]
    assert {one.error[0] for one in found} == {"ValueError"}
    assert all(one.error == found[0].error for one in found)


def test_a_module_that_is_called_never_parks():
    block = """
        late = L[4].output
        class Hidden:
            shape = property(lambda self: late.shape)
            def __mul__(self, other): return torch.ones(1, 3)
        out.append(L[0](Hidden()))
"""
    assert outcome_of(block, 1, 2).error is None
    for num_stages in (2, 3):
        error = outcome_of(block, num_stages, 2).error
        assert error is not None
        assert error[0] == "ParkRefusedError"


def test_a_block_that_goes_its_own_way_waits_for_nobody():
    """Its asks have other numbers than those of the other stages: they could wait in a circle."""
    block = """
        for s in steps[:3]:
            out.append(float(L[2](L[0].weight).sum()))
            v = L[0](L[3].weight)
            try:
                float(L[0].output.sum())
            except OutOfOrderError:
                out.append('caught')
            w = L[0](v + L[3].weight)
            out.append(model.logits)
            out.append(float(w.sum()))
"""
    for num_stages in (3, 4):
        found = [outcome_of(block, num_stages, 3, seed) for seed in (1, 2)]
        assert found[0].seen() == found[1].seen()
        assert is_refused_for_a_call(found[0])


def test_what_each_line_has_brought_from_other_stages_is_on_record():
    block = """
        h = L[0].output
        w = L[4].weight
        out.append(float(L[4].output.sum()))
        out.append(float(h.sum()))
        out.append(float((h * 2).sum()))
        out.append(float(w[0].sum()))
        for s in steps[1:]:
            out.append(float((L[1].output[0] * 1).sum()))
"""
    first, second = outcome_of(block, 2, 4).pulls
    assert [one.filename for one in first + second] == ["<r>"] * 5
    assert all(one.waited_s > 0 for one in first + second)
    assert [(one.owner, one.location, one.line) for one in first] == [
        (1, "model.layers.4.output", 5),
        (1, "model.layers.4.weight", 8),
    ]
    # A sum is made by the owner: one number crosses.
    assert [(one.num_pulls, one.bytes_received) for one in first] == [(1, 8), (1, 8)]
    assert [(one.owner, one.location, one.line) for one in second] == [
        (0, "model.layers.0.output", 6),
        (0, "model.layers.0.output", 7),
        (0, "model.layers.1.output", 10),
    ]
    received = [(one.num_pulls, one.bytes_received) for one in second]
    assert received == [(1, 8), (1, 2 * 3 * 8), (3, 3 * 3 * 8)]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_long_generation_keeps_no_more_answers_than_a_short_one(num_stages: int):
    block = """
        last = [None, None]
        for s in steps[:150]:
            early = L[0].output
            if s % 7 == 0:
                early[-1] += 1
                last[0] = early
            h = L[3].output[0] * 1
            last[1] = L[4].output[0]
            model.samples = torch.tensor([[3]])
        out.append(s)
        out.append(last[1])
"""
    pipeline = Pipeline(num_stages, 1, delay_s=0.0)
    found = pipeline.run([Request("r", "        out = []" + block, 5, 2, 150)])["r"]
    assert pipeline.rest() == {}
    assert found.saved[0] == 149
    assert found.saved == outcome_of(block, 1, 150).saved
    assert 0 < pipeline.most_kept < 60  # of 3 * 150
