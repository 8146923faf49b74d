"""Random blocks agree on one, two and three stages; one that does not is shown made small.

`make fuzz` runs more of them, new ones each time: `NNSIGHT_PP_FUZZ` says how many.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from fakes.drawn_programs import Refusals, Run, programs_to_run, refusal_in, runs
from fakes.pipeline import Outcome, Pipeline


def outcomes_of(run: Run, num_stages: int, *, has_calls: bool) -> dict[str, Outcome]:
    # With calls, what a stage may answer depends on the activations that have arrived.
    pipeline = Pipeline(
        num_stages, run.seed, with_order=run.seed % 5 != 0, opens_early=not has_calls
    )
    found = pipeline.run(run.requests)
    assert pipeline.rest() == {}
    return found


def test_random_programs_agree_on_every_number_of_stages():
    refusals = Refusals()

    @programs_to_run(300)
    @given(runs())
    def agree(run: Run) -> None:
        has_calls = any(
            "](" in request.source or "weight" in request.source for request in run.requests
        )
        wanted = outcomes_of(run, 1, has_calls=has_calls)
        for num_stages in (2, 3):
            found = outcomes_of(run, num_stages, has_calls=has_calls)
            for name, outcome in found.items():
                refusals.num_run += 1
                if outcome.seen() == wanted[name].seen():
                    continue
                refusal = refusal_in((outcome.error or ("", 0))[0], outcome.words)
                assert refusal is not None, (
                    f"{name} on {num_stages} stages gave {outcome.seen()}, not "
                    f"{wanted[name].seen()}; {outcome.words}"
                )
                refusals[refusal] += 1

    agree()
    refusals.assert_few()


def test_only_what_is_documented_counts_as_refused():
    said = "It was edited after the block had\nwaited for model.layers.0.call#0, and by"
    assert refusal_in("OutOfOrderError", said) == "an edit after a call was waited for"
    assert refusal_in("RowsError", said) is None
    assert refusal_in("OutOfOrderError", "model.layers.1.output#0 was asked for, but") is None
    refusals = Refusals()
    refusals.num_run = 100
    refusals["one"] += 3
    refusals.assert_few()
    refusals["two"] += 1
    with pytest.raises(AssertionError, match="of 100"):
        refusals.assert_few()
