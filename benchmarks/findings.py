"""What a benchmark finds: one row for each question, with what it is compared with."""

from __future__ import annotations

import argparse
import json
import statistics
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
        is_paired: Whether each sample was taken back to back with the one beside it, so that the
            median of the pairs' ratios is steadier than the ratio of the medians.
        goal: The largest ratio that is good, where somebody has set one.
    """

    name: str
    title: str
    samples: Sequence[float]
    beside: Sequence[float] = ()
    beside_title: str = ""
    is_paired: bool = False
    goal: float | None = None

    @property
    def ratio(self) -> float:
        """How many times the other it takes; not a number without another."""
        if not self.beside:
            return float("nan")
        if self.is_paired:
            return statistics.median(self.pair_ratios())
        other = median_and_p90(self.beside)[0]
        return median_and_p90(self.samples)[0] / other if other > 0 else float("nan")

    def pair_ratios(self) -> list[float]:
        """Return the ratio of each pair."""
        return [one / other for one, other in zip(self.samples, self.beside, strict=True)]


class Found(NamedTuple):
    """What one suite has found.

    Attributes:
        findings: Its rows of time.
        text: Its table and what else it has to say, in Markdown, where `markdown` does not say it.
        cells: What it has found besides, as plain data.
    """

    findings: list[Finding]
    text: str = ""
    cells: Any = None


def markdown(found: Sequence[Finding], last: Mapping[str, float] | None = None) -> str:
    """Return a table of ``found``; ``last`` holds the ratios of the run to compare with."""
    rows = []
    has_goals = any(one.goal is not None for one in found)
    for one in found:
        median, p90 = median_and_p90(one.samples)
        before = (last or {}).get(one.name, float("nan"))
        to_last = one.ratio / before if before else float("nan")
        ratio = f"{one.ratio:.3f}" if one.is_paired else shown(one.ratio)
        figures = [shown(median), shown(p90), ratio, one.beside_title or "–"]
        goal = [] if not has_goals else ["–" if one.goal is None else f"{one.goal:g}"]
        rows.append([one.title, *figures, shown(to_last), *goal])
    head = ["microseconds", "median", "p90", "ratio", "to", "ratio to that of the last result"]
    return table(head + (["goal"] if has_goals else []), rows)


def as_json(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return ``found`` with all samples and ratios, for a file."""
    return [{**one._asdict(), "ratio": one.ratio} for one in found]


def from_json(kept: list[dict[str, Any]]) -> list[Finding]:
    """Return what `as_json` has kept."""
    return [Finding(**{name: one[name] for name in Finding._fields if name in one}) for one in kept]


def write_json(path: Path, found: Sequence[Finding], text: str = "", cells: Any = None) -> None:
    """Keep what a suite has found for `read_json`."""
    kept = {"findings": as_json(found), "text": text, "cells": cells}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read_json(path: Path) -> Found:
    """Return what `write_json` has kept."""
    kept = json.loads(path.read_text())
    return Found(from_json(kept["findings"]), kept["text"], kept["cells"])


def main(findings: Callable[..., list[Finding]], text: str | None) -> int:
    """Run one benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few samples of everything")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    given = parser.parse_args()
    found = findings(quick=given.quick)
    print(f"{markdown(found)}\n\n{environment()}")
    if given.json is not None:
        write_json(given.json, found)
    return 0
