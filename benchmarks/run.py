"""All benchmarks, one after the other, as one Markdown table each.

    python -m benchmarks.run [--suite local,path] [--quick] [--json FILE] [--out FILE]

`--quick` takes a few samples of everything: it shows that all of it runs and gives right values,
and says nothing about time. The last column compares each ratio with that of the newest result that
`benchmarks/results` has for the same processor.
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

from benchmarks.findings import Finding, as_json, from_json, markdown
from benchmarks.timing import cpu_name

RESULTS = Path(__file__).parent / "results"
SUITES = ("local", "path", "thread_state")


def last_ratios() -> dict[str, float]:
    """Return the ratios of the newest committed result of this processor, by question."""
    for path in sorted(RESULTS.glob("*.json"), reverse=True):
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept.get("cpu") == cpu_name():
            return {one["name"]: one["ratio"] for rows in kept["suites"].values() for one in rows}
    return {}


def run_suites(names: list[str], *, quick: bool) -> dict[str, list[Finding] | None]:
    """Run each suite in a process of its own; return what they found, None where one failed."""
    found: dict[str, list[Finding] | None] = {}
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
            is_good = done.returncode == 0 and path.exists()
            found[name] = from_json(json.loads(path.read_text())) if is_good else None
        spent = f"{time.monotonic() - start:.0f} s"
        print(f"    {spent}" if is_good else f"    failed after {spent}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--suite", default=",".join(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="a few samples of everything")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    given = parser.parse_args()
    names = given.suite.split(",")
    if unknown := set(names) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {SUITES}")
    ran = run_suites(names, quick=given.quick)
    found = {name: rows for name, rows in ran.items() if rows is not None}
    last = last_ratios()
    text = "\n\n".join(f"## {name}\n\n{markdown(rows, last)}" for name, rows in found.items())
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    if given.json is not None:
        kept = {"cpu": cpu_name(), "suites": {name: as_json(rows) for name, rows in found.items()}}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if len(found) == len(names) else 1


if __name__ == "__main__":
    raise SystemExit(main())
