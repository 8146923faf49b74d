"""Random blocks agree on one, two and three stages; one that does not is shown made small.

`make fuzz` runs more of them, new ones each time: `NNSIGHT_PP_FUZZ` says how many.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, given, settings

from fakes.drawn_programs import Run, runs
from fakes.pipeline import Outcome, Pipeline

CHOSEN = os.environ.get("NNSIGHT_PP_FUZZ")


def outcomes_of(run: Run, num_stages: int, *, has_calls: bool) -> dict[str, Outcome]:
    # With calls, what a stage may answer depends on the activations that have arrived.
    pipeline = Pipeline(
        num_stages, run.seed, with_order=run.seed % 5 != 0, opens_early=not has_calls
    )
    found = pipeline.run(run.requests)
    assert pipeline.rest() == {}
    return found


def is_refused_for_a_call(outcome: Outcome) -> bool:
    """Whether a stage waited for a call beyond its forward, and its block then came too late."""
    return outcome.was_held_up and (outcome.error or ("", 0))[0] == "OutOfOrderError"


@settings(
    max_examples=int(CHOSEN or 300),
    deadline=None,
    derandomize=CHOSEN is None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
@given(runs())
def test_random_programs_agree_on_every_number_of_stages(run: Run):
    has_calls = any(
        "](" in request.source or "weight" in request.source for request in run.requests
    )
    wanted = outcomes_of(run, 1, has_calls=has_calls)
    for num_stages in (2, 3):
        found = outcomes_of(run, num_stages, has_calls=has_calls)
        for name, outcome in found.items():
            if not (has_calls and is_refused_for_a_call(outcome)):
                assert outcome.seen() == wanted[name].seen(), f"{name} on {num_stages} stages"
