"""What a benchmark finds: one row for each question, with what it is compared with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import environment, median_and_p90, shown, table


class Finding(NamedTuple):
    """One answer.

    Attributes:
        name: Names it from run to run.
        title: The question, in words.
        samples: In microseconds.
        beside: Samples of what it is compared with, taken in turns with the others, or empty.
        beside_title: What that is.
    """

    name: str
    title: str
    samples: Sequence[float]
    beside: Sequence[float] = ()
    beside_title: str = ""

    @property
    def ratio(self) -> float:
        """How many times the other it takes; not a number without another."""
        if not self.beside:
            return float("nan")
        other = median_and_p90(self.beside)[0]
        return median_and_p90(self.samples)[0] / other if other > 0 else float("nan")


def markdown(found: Sequence[Finding], last: Mapping[str, float] | None = None) -> str:
    """Return a table of ``found``; ``last`` holds the ratios of the run to compare with."""
    rows = []
    for one in found:
        median, p90 = median_and_p90(one.samples)
        before = (last or {}).get(one.name, float("nan"))
        to_last = one.ratio / before if before else float("nan")
        figures = [shown(median), shown(p90), shown(one.ratio), one.beside_title or "–"]
        rows.append([one.title, *figures, shown(to_last)])
    head = ["microseconds", "median", "p90", "ratio", "to", "ratio to that of the last result"]
    return f"{table(head, rows)}\n\n{environment()}"


def as_json(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return ``found`` with all samples and ratios, for a file."""
    return [{**one._asdict(), "ratio": one.ratio} for one in found]


def from_json(kept: list[dict[str, Any]]) -> list[Finding]:
    """Return what `as_json` has kept."""
    return [Finding(*(one[name] for name in Finding._fields)) for one in kept]


def main(findings: Callable[..., list[Finding]], text: str | None) -> int:
    """Run one benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few samples of everything")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    given = parser.parse_args()
    found = findings(quick=given.quick)
    print(markdown(found))
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    return 0
