"""Random blocks as a hypothesis strategy: one that fails is made small before it is shown."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fakes.pipeline import Request
from fakes.programs import Toy, Writer

# Of a statement: out of order or raising; a call or a weight; a drawn number.
KINDS = ((0.0, 0.0, 0.0), (0.08, 0.0, 0.0), (0.0, 0.2, 0.0), (0.25, 0.0, 0.0), (0.05, 0.1, 0.2))


# How many programs `make fuzz` wants, new ones each time.
CHOSEN = os.environ.get("NNSIGHT_PP_FUZZ")


def programs_to_run(usual: int) -> settings:
    """Return how a test runs ``usual`` programs, the same ones each time, or those chosen."""
    return settings(
        max_examples=int(CHOSEN or usual),
        deadline=None,
        derandomize=CHOSEN is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )


# CAUTION: hypothesis draws numbers from 100 up also from the constants of the modules of ours that
# are loaded, and programs would be others where more tests have run before.
# Source: hypothesis 6.170 internal/constants_ast.py leaves out those below.
FINE = st.integers(0, 99)


class Drawn:
    """Decides as `random.Random` does, each time by a draw that can be made smaller."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def random(self) -> float:
        # The smallest draw gives the largest number: nothing happens by chance then.
        return 1.0 - (1 + self._draw(FINE)) / 101

    def randint(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, items: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(items))

    def choices(self, items: Sequence[Any], weights: Sequence[float]) -> list[Any]:
        # Half a weight is the smallest that the writer gives.
        rest = self._draw(st.integers(0, int(2 * sum(weights)) - 1))
        for item, weight in zip(items, weights, strict=True):
            rest -= int(2 * weight)
            if rest < 0:
                return [item]
        return [items[-1]]


@st.composite
def bodies(draw: st.DrawFn, words: Toy, kinds: Sequence[tuple[float, float, float]]) -> str:
    """Draw the lines of a block, indented by four, without the line that makes its list."""
    mischief, calls, draws = draw(st.sampled_from(kinds))
    return Writer(Drawn(draw), mischief=mischief, calls=calls, draws=draws, words=words).program()


class Run:
    """Requests that share a pipeline, and the seed of its batches, delays and orders."""

    def __init__(self, requests: list[Request], seed: int) -> None:
        self.requests = requests
        self.seed = seed

    def __repr__(self) -> str:
        shown = [f"Run of seed {self.seed}, with blocks to paste into `NAMED`:"]
        for one in self.requests:
            facts = f"token={one.token}, num_rows={one.num_rows}, most_steps={one.most_steps}"
            shown.append(
                f'{one.name} ({facts}, is_drawing={one.is_drawing}):\n"""\n{one.source}"""'
            )
        return "\n".join(shown)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw one to three requests for the toy pipeline."""
    requests = []
    for index in range(draw(st.integers(1, 3))):
        body = draw(bodies(Toy(), KINDS))
        request = Request(
            name=f"r{index}",
            source="    out = []\n" + body,
            token=draw(st.integers(1, 10)),
            num_rows=draw(st.integers(1, 3)),
            most_steps=draw(st.integers(1, 4)),
            is_drawing="rand" in body,
        )
        requests.append(request)
    return Run(requests, draw(FINE))


# What several stages may refuse where one stage runs it, by words of the error. One cause: a
# stage can answer a call with a later stage's value only when that one is through with the step.
REFUSALS = {
    "a value asked for after a call was waited for": "a call that another stage could answer only",
    "an edit after a call was waited for": "It was edited after the block had waited for",
}
# Of all programs. A refusal of what should run would soon show as more.
MOST_REFUSED = 0.03


def refusal_in(error: str, words: str) -> str | None:
    """Return which documented refusal an error of class ``error`` that says ``words`` is."""
    if error != "OutOfOrderError":
        return None
    plain = " ".join(words.split())
    return next((name for name, part in REFUSALS.items() if part in plain), None)


class Refusals(Counter[str]):
    """How many programs were refused, by what for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_run = 0

    def assert_few(self) -> None:
        share = self.total() / max(self.num_run, 1)
        # Few programs say little about a share.
        assert share <= MOST_REFUSED or self.total() <= 2, f"{dict(self)} of {self.num_run}"
