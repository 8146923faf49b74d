"""All benchmarks, one after the other, as Markdown tables and pictures.

    python -m benchmarks.run [--suite local,path] [--quick] [--json FILE] [--out FILE]
        [--options 'cost=--rounds 3 --in-flight 1,16']

`--quick` takes a few samples of everything: it shows that all of it runs and gives right values,
and says nothing about time. One column compares each ratio with that of the newest result that
`benchmarks/results` has for the same processor. `--out` and `--json` together make a result to
keep; pictures go beside the former.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.findings import Found, as_json, markdown, read_json
from benchmarks.timing import cpu_name, environment, versions

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = Path(__file__).parent / "results"
SUITES = ("equivalence", "cost", "idle", "path", "local", "thread_state", "tensor")


def last_ratios(name: str) -> dict[str, float]:
    """Return a suite's ratios in the newest result of this processor, by question."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept.get("cpu") != cpu_name() or name not in kept["suites"]:
            continue
        suite = kept["suites"][name]
        rows = suite["findings"] if isinstance(suite, dict) else suite
        return {one["name"]: one["ratio"] for one in rows}
    return {}


def run_suites(
    names: list[str], options: dict[str, str], *, quick: bool
) -> Iterator[tuple[str, Found | None]]:
    """Run each suite in a process of its own; yield its name and what it found, None for nothing.

    The name of one that failed says so: its table is kept, as it says what failed.

    Args:
        names: Which suites.
        options: What each is given on its command line, by name.
        quick: Whether each takes a few samples only.
    """
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--json", str(path)]
            command += ["--quick"] if quick else []
            command += shlex.split(options.get(name, ""))
            done = subprocess.run(
                command, cwd=RESULTS.parents[1], stdout=subprocess.DEVNULL, check=False
            )
            found = read_json(path) if path.exists() else None
        spent = f"{time.monotonic() - start:.0f} s"
        is_good = done.returncode == 0 and found is not None
        print(f"    {spent}" if is_good else f"    failed after {spent}", file=sys.stderr)
        yield name if is_good else f"{name}, failed", found


def report(found: dict[str, Found], options: dict[str, str]) -> str:
    """Return all tables, and the line of what they were measured on."""
    parts = [f"{environment()}, {versions()}"]
    for name, one in found.items():
        parts.append(f"## {name}")
        if name in options:
            parts.append(f"Run as `bench_{name} {options[name]}`.")
        if one.text:
            parts.append(one.text)
        if one.findings:
            parts.append(markdown(one.findings, last_ratios(name)))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="a few samples of everything")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--out", type=Path, help="write tables and pictures to this file too")
    parser.add_argument(
        "--options",
        action="append",
        default=[],
        metavar="SUITE=...",
        help="what one suite's own command is given; may be repeated",
    )
    given = parser.parse_args()
    names = given.suite.split(",")
    options: dict[str, str] = dict(one.split("=", 1) for one in given.options)
    if unknown := (set(names) | set(options)) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {SUITES}")
    found: dict[str, Found] = {}
    for name, one in run_suites(names, options, quick=given.quick):
        if one is not None:
            found[name] = one
            keep(found, options, given.out, given.json)  # now: a later suite may be interrupted
    print(report(found, options))
    return 0 if set(names) == set(found) else 1


def keep(
    found: dict[str, Found], options: dict[str, str], out: Path | None, samples: Path | None
) -> None:
    """Write tables and pictures to ``out``, all samples to ``samples``, where they are given."""
    if out is not None:
        from benchmarks.pictures import draw

        drawn = draw(found, out)
        shown = [f"![{title}]({path.name})" for title, path in drawn.items()]
        out.write_text("\n\n".join([report(found, options), *shown]) + "\n")
    if samples is not None:
        suites = {
            name: {"findings": as_json(one.findings), "cells": one.cells}
            for name, one in found.items()
        }
        kept = {"cpu": cpu_name(), "versions": versions(), "suites": suites}
        samples.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
