"""Random blocks on the real classes, on one to four stages: the same values, and nothing stuck.

`NNSIGHT_PP_SIMULATION=SEED:RUNS` runs more of them, e.g. `1000:5000`.
"""

from __future__ import annotations

import os
import random

import pytest

from fakes.pipeline import Outcome, Pipeline, Request
from fakes.programs import program

SEED, _, RUNS = os.environ.get("NNSIGHT_PP_SIMULATION", "0:120").partition(":")
CHUNK = 20


def requests(seed: int) -> list[Request]:
    chance = random.Random(f"requests {seed}")
    return [
        Request(
            name=f"r{index}",
            source=program(seed * 10 + index, mischief=chance.choice([0.0, 0.0, 0.08, 0.25])),
            token=chance.randint(1, 10),
            num_rows=chance.randint(1, 3),
            most_steps=chance.randint(1, 4),
        )
        for index in range(chance.randint(1, 4))
    ]


def run(num_stages: int, seed: int, *, with_order: bool) -> dict[str, Outcome]:
    pipeline = Pipeline(num_stages, seed, with_order=with_order)
    found = pipeline.run(requests(seed))
    assert pipeline.rest() == {}
    return found


def check(seed: int) -> None:
    with_order = seed % 5 != 0
    try:
        wanted = run(1, seed, with_order=with_order)
        for num_stages in (2, 3, 4):
            found = run(num_stages, seed, with_order=with_order)
            for name, outcome in wanted.items():
                assert found[name].seen() == outcome.seen(), f"{name} on {num_stages} stages"
    except BaseException as error:
        error.add_note(f"\nseed {seed}, with_order {with_order}")
        for request in requests(seed):
            lines = enumerate(request.source.splitlines(), start=2)
            text = "\n".join(f"{number:4d} {line}" for number, line in lines)
            error.add_note(f"{request.name} ({request.num_rows} rows, token {request.token}, "
                           f"{request.most_steps} steps):\n{text}")  # fmt: skip
        raise


@pytest.mark.slow
@pytest.mark.parametrize("first", range(int(SEED), int(SEED) + int(RUNS), CHUNK))
def test_random_blocks_give_the_same_on_every_number_of_stages(first: int):
    for seed in range(first, min(first + CHUNK, int(SEED) + int(RUNS))):
        check(seed)


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
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("most_steps", [1, 3])
def test_named_blocks_give_the_same_on_every_number_of_stages(name: str, most_steps: int):
    found = {}
    for num_stages in (1, 2, 3, 4):
        request = Request("r", "        out = []" + NAMED[name], 5, 2, most_steps)
        pipeline = Pipeline(num_stages, 1)
        found[num_stages] = pipeline.run([request])["r"].seen()
        assert pipeline.rest() == {}
    assert found[2] == found[3] == found[4] == found[1]
    assert len(found[1][0]) > 0, "it saved nothing, so it showed nothing"
    assert isinstance(found[1][0], list), f"it failed: {found[1]}"
