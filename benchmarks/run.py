"""All benchmarks, one after the other, as Markdown tables and pictures.

    python -m benchmarks.run [--suite local,path] [--quick] [--json FILE] [--out FILE]

`--quick` takes a few samples of everything: it shows that all of it runs and gives right values,
and says nothing about time. One column compares each ratio with that of the newest result that
`benchmarks/results` has for the same processor. `--out` and `--json` together make a result to
keep; pictures go beside the former.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.findings import Found, as_json, markdown, read_json
from benchmarks.timing import cpu_name, environment, versions

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


def run_suites(names: list[str], *, quick: bool) -> dict[str, Found | None]:
    """Run each suite in a process of its own; return what they found, None where one failed."""
    found: dict[str, Found | None] = {}
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--json", str(path)]
            command += ["--quick"] if quick else []
            done = subprocess.run(
                command, cwd=RESULTS.parents[1], stdout=subprocess.DEVNULL, check=False
            )
            found[name] = read_json(path) if path.exists() else None
            is_good = done.returncode == 0 and path.exists()
        spent = f"{time.monotonic() - start:.0f} s"
        print(f"    {spent}" if is_good else f"    failed after {spent}", file=sys.stderr)
        if not is_good:
            # Its table is kept: it says what failed.
            found[f"{name}, failed"] = found.pop(name)
    return found


def report(found: dict[str, Found]) -> str:
    """Return all tables, and the line of what they were measured on."""
    parts = [f"{environment()}, {versions()}"]
    for name, one in found.items():
        parts.append(f"## {name}")
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
    given = parser.parse_args()
    names = given.suite.split(",")
    if unknown := set(names) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {SUITES}")
    ran = run_suites(names, quick=given.quick)
    found = {name: one for name, one in ran.items() if one is not None}
    text = report(found)
    print(text)
    if given.out is not None:
        from benchmarks.pictures import draw

        drawn = draw(found, given.out)
        shown = [f"![{title}]({path.name})" for title, path in drawn.items()]
        given.out.write_text("\n\n".join([text, *shown]) + "\n")
    if given.json is not None:
        suites = {
            name: {"findings": as_json(one.findings), "cells": one.cells}
            for name, one in found.items()
        }
        kept = {"cpu": cpu_name(), "versions": versions(), "suites": suites}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if set(names) == set(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
