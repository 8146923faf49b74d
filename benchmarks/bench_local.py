"""What blocks on a module of this process cost, beside nnsight 0.8.1 and beside plain torch hooks.

    python -m benchmarks.bench_local [--quick] [--rows read,cache] [--json FILE] [--out FILE]

Each library runs in a process of its own (nnsight in an environment of its own, which is made at
the first run), and the three are asked for one short sample in turns, so that what else the
machine does disturbs all alike. Prints one Markdown table and the line of the environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.findings import Finding, write_json
from benchmarks.local_models import write_cold_files
from benchmarks.peer_env import NNSIGHT, PeerMissingError, peer_python
from benchmarks.timing import environment, median_and_p90, shown, table

ROOT = Path(__file__).resolve().parents[1]
OURS, PEER, HOOKS = "nnsight_pp", "nnsight", "hooks"


class Question(NamedTuple):
    """A row of the table: the method that answers it, and how many pairs make a sample."""

    name: str
    title: str
    pairs: int
    rounds: int = 15


QUESTIONS = (
    Question("idle", "idle wrapped module, per call", 40),
    Question("unread", "unread visit of a traced module", 20),
    Question("read", "read", 10),
    Question("read_and_write", "read and write", 10),
    Question("invoke", "invoke that sees the whole batch", 5),
    Question("invoke_rows", "invoke with a row of its own", 5),
    Question("warm_trace", "warm trace, nothing read", 40),
    Question("one_save", "warm trace, one value saved", 40),
    Question("cold_first", "cold capture, first block of a file of 300 lines", 1),
    Question("cold_next", "cold capture, next block of that file", 1),
    Question("cache", "`cache` of all layers, per layer", 5),
    Question("generate_small", "32-token `generate`, one read per step, 12 tiny layers", 1, 25),
    Question("generate_smollm2", "the same on SmolLM2-135M", 1, 5),
    Question("many_small", "64 invokes x 32 reads, per read", 1),
    Question("many_large", "256 invokes x 32 reads, per read", 1, 7),
)


class Child:
    """A process that answers for one library."""

    def __init__(self, library: str, python: str, folder: Path) -> None:
        command = [python, "-m", "benchmarks.local_child", library, str(folder)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, name: str, pairs: int) -> dict[str, Any]:
        """Return the answer, which has `us`, `missing` or `error`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{name} {pairs}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "the process is gone"}
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process is gone"}

    def end(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def start_children(folder: Path) -> dict[str, Child]:
    """Start a process for each library that can be had; say why for one that cannot."""
    pythons = {OURS: sys.executable, HOOKS: sys.executable}
    try:
        pythons[PEER] = str(peer_python(NNSIGHT))
    except PeerMissingError as error:
        print(f"{NNSIGHT} is left out: {error}", file=sys.stderr)
    return {library: Child(library, python, folder) for library, python in pythons.items()}


def measure(questions: list[Question], children: dict[str, Child], quick: bool) -> dict[str, Any]:
    """Return the samples of each question by library, taken in turns."""
    samples: dict[str, Any] = {one.name: {name: [] for name in children} for one in questions}
    failed: set[tuple[str, str]] = set()
    rounds = 2 if quick else max(one.rounds for one in questions)
    shows = sys.stderr.isatty()
    for number in range(rounds):
        for one in questions:
            if number >= one.rounds:
                continue
            if shows:
                print(f"\rround {number + 1}/{rounds} {one.name:20}", end="", file=sys.stderr)
            for library, child in children.items():
                if (one.name, library) in failed:
                    continue
                answer = child.ask(one.name, 1 if quick else one.pairs)
                if "us" in answer:
                    samples[one.name][library].append(answer["us"])
                else:
                    failed.add((one.name, library))
                    if "error" in answer:
                        print(f"\n{library}, {one.name}: {answer['error']}", file=sys.stderr)
    if shows:
        print(file=sys.stderr)
    return samples


def summary(questions: list[Question], samples: dict[str, Any]) -> list[dict[str, Any]]:
    """Return median, p90 and ratios of each question."""
    found = []
    for one in questions:
        row: dict[str, Any] = {"name": one.name, "title": one.title}
        for library, values in samples[one.name].items():
            if values:
                row[library] = dict(zip(("median", "p90"), median_and_p90(values), strict=True))
        for other in (PEER, HOOKS):
            if OURS in row and other in row and row[other]["median"] > 0:
                row[f"to_{other}"] = row[OURS]["median"] / row[other]["median"]
        found.append(row)
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["title"]]
    for library in (OURS, PEER, HOOKS):
        figures = row.get(library, {"median": float("nan"), "p90": float("nan")})
        cells += [f"{shown(figures['median'])} ({shown(figures['p90'])})"]
    return cells + [shown(row.get(f"to_{other}", float("nan"))) for other in (PEER, HOOKS)]


def markdown(found: list[dict[str, Any]]) -> str:
    """Return the table, and what it was measured on."""
    head = ["microseconds, median (p90)", "this library", NNSIGHT, "plain hooks"]
    head += ["ratio to nnsight", "ratio to hooks"]
    text = table(head, [_cells(row) for row in found])
    by_name = {row["name"]: row for row in found}
    if all(OURS in by_name.get(name, {}) for name in ("many_small", "many_large")):
        small, large = (by_name[name][OURS]["median"] for name in ("many_small", "many_large"))
        text += f"\n\nA read beside 256 invokes costs {large / small:.2f} times one beside 64."
    return f"{text}\n\n{environment()}, one torch thread"


def take_samples(questions: list[Question], quick: bool) -> dict[str, Any]:
    """Start the libraries' processes, and return the samples of each question."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cold_files(folder, max(one.rounds for one in QUESTIONS))
        time.sleep(2.1)  # files older than the processes, as a user's are
        children = start_children(folder)
        try:
            return measure(questions, children, quick)
        finally:
            for child in children.values():
                child.end()


def findings(questions: list[Question], samples: dict[str, Any]) -> list[Finding]:
    """Return each row beside nnsight's, or beside hooks where nnsight has none."""
    found = []
    for one in questions:
        of = samples[one.name]
        beside, title = (of[PEER], NNSIGHT) if of.get(PEER) else (of[HOOKS], "plain hooks")
        if of[OURS]:
            found.append(Finding(one.name, one.title, of[OURS], beside, title))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two samples of everything")
    parser.add_argument("--rows", help="names of rows, with commas")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    given = parser.parse_args()
    # A quick run leaves out the one that takes seconds for each sample.
    usual = [one.name for one in QUESTIONS if not (given.quick and one.name == "generate_smollm2")]
    chosen = usual if given.rows is None else given.rows.split(",")
    questions = [one for one in QUESTIONS if one.name in chosen]
    samples = take_samples(questions, given.quick)
    found = summary(questions, samples)
    text = markdown(found)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    if given.json is not None:
        write_json(given.json, findings(questions, samples), text)
    return 0 if all(samples[one.name][OURS] for one in questions) else 1


if __name__ == "__main__":
    raise SystemExit(main())
