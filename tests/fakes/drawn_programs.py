"""Random blocks as a hypothesis strategy: one that fails is made small before it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from fakes.pipeline import Request
from fakes.programs import Toy, Writer

# Of a statement: out of order or raising; a call or a weight; a drawn number.
KINDS = ((0.0, 0.0, 0.0), (0.08, 0.0, 0.0), (0.0, 0.2, 0.0), (0.25, 0.0, 0.0), (0.05, 0.1, 0.2))


class Drawn:
    """Decides as `random.Random` does, each time by a draw that can be made smaller."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def random(self) -> float:
        # The smallest draw gives the largest number: nothing happens by chance then.
        return 1.0 - (1 + self._draw(st.integers(0, 999))) / 1001

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
    return Run(requests, draw(st.integers(0, 1000)))
