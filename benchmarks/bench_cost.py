"""What reading and steering cost on an engine, beside what else can do the same.

    python -m benchmarks.bench_cost [--quick] [--model tiny] [--shapes 1x1,2x1,3x1,1x3]
        [--in-flight 1,4,16] [--prompts 16,128,512] [--rounds 8] [--parts loads,workloads]
        [--json FILE]

A shape is stages x tensor-parallel ranks. In each, the contenders are processes that live at once
and take turns: this library on an engine; plain vLLM, eager, which with hand-written hooks is the
floor (two processes of each of these); and with one
rank plain vLLM compiled, Hugging Face with raw hooks, this library and nnsight 0.8.1 in one
process. What they keep must be the same numbers, or the run fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.backends import MODELS
from benchmarks.contender_process import (
    Contender,
    ContenderError,
    in_turns,
    start_pair,
    start_together,
)
from benchmarks.engine_arguments import engine_arguments
from benchmarks.findings import Finding, write_json
from benchmarks.findings import markdown as rows_of_time
from benchmarks.loads import Load
from benchmarks.peer_env import LENS, NNSIGHT, PeerMissingError, peer_python
from benchmarks.timing import environment, median_and_p90, shown, table
from benchmarks.workloads import WORKLOADS

TITLES = {
    "ours": "this library, engine",
    "plain": "plain vLLM",
    "floor": "hand-written hooks",
    "compiled": "plain vLLM, compiled",
    "hooks": "Hugging Face, raw hooks",
    "local": "this library, local",
    "nnsight": NNSIGHT,
}
GOALS = {"untraced": 1.01, "one": 1.05, "all": 1.3, "cross": 1.1}
# The same engine twice, in float32, differs in the last bits. Where another library computed the
# model, a near tie may also have chosen another token, and all that follows it differs:
# `bench_equivalence` is the one that compares values.
MOST_DIFFERENCE = {"ours": 1e-4}
MOST_DIFFERENCE_ELSEWHERE = 0.25


class Shape(NamedTuple):
    """How an engine is split."""

    stages: int
    tp: int

    @property
    def title(self) -> str:
        """Say it in words."""
        return f"{self.stages} stage{'s' if self.stages > 1 else ''}, tp {self.tp}"


class WrongValuesError(Exception):
    """Two contenders have kept other numbers."""


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def start(up: ExitStack, shape: Shape, folder: Path, *, quick: bool) -> dict[str, Contender]:
    """Start the contenders of a shape; say why one is left out."""
    ours, plain = engine_arguments(folder, stages=shape.stages, tp=shape.tp)
    module = {"repo_or_path": str(folder)}
    here: dict[str, tuple[str, dict[str, Any]]] = {
        "hooks": ("hooks", module),
        "local": ("ours", {**module, "local": True}),
    }
    if quick:
        return start_together(up, {"ours": ("ours", ours), "plain": ("plain", plain), **here})
    found = start_pair(up, ("ours", ours), ("plain", plain), quick=quick)
    _say(f"{shape.title}: the engines are up, ours after {found['ours'].start_s:.0f} s")
    wanted: dict[str, tuple[str, dict[str, Any]]] = {}
    if shape == (1, 1):
        wanted = {
            **here,
            "compiled": ("plain", {**plain, "enforce_eager": False}),
            "nnsight": ("nnsight", module),
        }
    for name, (kind, arguments) in wanted.items():
        try:
            python = str(peer_python(NNSIGHT)) if kind == "nnsight" else sys.executable
            found[name] = up.enter_context(closing(Contender(kind, arguments, python=python)))
            _say(f"{shape.title}: {TITLES[name]} is up after {found[name].start_s:.0f} s")
        except (ContenderError, PeerMissingError) as error:
            _say(f"{TITLES[name]} is left out: {error}")
    return found


def loads_of(shape: Shape, given: argparse.Namespace) -> list[Load]:
    """Return what is timed: the axes one by one from a common middle, not their product."""
    counts, lengths = _ints(given.in_flight), _ints(given.prompts)
    short = lengths[0]
    found = [Load("untraced", count, short) for count in counts]
    found += [Load("read", count, short) for count in counts]
    found += [Load("read", count, short, layers="all", rows="all") for count in counts]
    found += [Load("steer", count, short) for count in counts]
    if shape.stages > 1:
        found += [Load("cross", count, short) for count in counts]
    if given.quick or shape == (1, 1):
        found += [Load("read", 1, short, layers="half"), Load("read", 1, short, layers="all")]
        found += [Load("read", 1, short, rows="all")]
        for length in lengths[1:]:
            found += [Load("read", 1, length), Load("read", 1, length, layers="all", rows="all")]
    found.append(Load("first", 1, short, tokens=1))
    tokens = given.tokens
    return [one if one.kind == "first" else one._replace(tokens=tokens) for one in found]


def _why_without_lens() -> str:
    try:
        peer_python(LENS, alone=True)
    except PeerMissingError as error:
        return str(error)
    return "it can be installed here, but nobody has written its loads: they were never tried"


def _ints(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def time_load(
    up: dict[str, Contender], shape: Shape, load: Load, rounds: int
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Time one load on all contenders; return rows of time, and all figures of each."""
    asked = {name: one for name, one in up.items() if load.kind == "untraced" or name != "compiled"}
    baseline = "plain"

    def given_to(name: str, number: int) -> tuple[Load, int]:
        # No hook of one process sees another's values: this one is beside two stages without.
        is_without = load.kind == "cross" and name == baseline
        return (load._replace(kind="untraced") if is_without else load), number

    if rounds > 1:  # the first of a kind is slower; the second is another process's first
        in_turns(asked, 2, "run", lambda name, _: given_to(name, -1))
    answers = in_turns(asked, rounds, "run", given_to)
    _check(load, answers)
    beside = [one["s"] * 1e6 for one in answers[baseline]]
    is_plain = load.kind in ("untraced", "cross")
    beside_title = TITLES["plain" if is_plain else "floor"]
    goal = GOALS.get(load.kind, GOALS.get(load.layers) if load.kind == "read" else None)
    found, cells = [], []
    for name, got in answers.items():
        samples = [one["s"] * 1e6 for one in got]
        shown_name = "floor" if name == "plain" and not is_plain else name
        cells.append(_cell(load, shape, TITLES[shown_name], got))
        if name != baseline:
            found.append(
                Finding(
                    f"{load.name}, {shape.title}, {name}",
                    f"{load.title}, {shape.title}: {TITLES[name]}",
                    samples,
                    beside,
                    beside_title,
                    True,
                    goal if name == "ours" else None,
                )
            )
    return found, cells


def _check(load: Load, answers: dict[str, list[dict[str, Any]]]) -> None:
    """Raise where a contender kept other numbers than the floor did."""
    if load.kind not in ("read", "first"):
        return
    for number, right in enumerate(answers["plain"]):
        count, size = right["values"]
        if not count or not size:
            raise WrongValuesError(f"{load.title}: the floor has kept nothing")
        for name, got in answers.items():
            other, mean = got[number]["values"]
            most = MOST_DIFFERENCE.get(name, MOST_DIFFERENCE_ELSEWHERE)
            if other != count or abs(mean - size) > most * size:
                raise WrongValuesError(
                    f"{load.title}: {TITLES[name]} kept {other} numbers of mean size {mean}, the "
                    f"floor {count} of {size}"
                )


def _cell(load: Load, shape: Shape, who: str, got: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, p90 = median_and_p90([one["s"] for one in got])
    return {
        "load": load.title, "shape": shape.title, "who": who, "ms": 1000 * seconds,
        "p90_ms": 1000 * p90, "requests_per_s": load.num_prompts / seconds,
        "tokens_per_s": load.num_prompts * load.tokens / seconds,
        "link_bytes": statistics.median(one.get("link_bytes", 0) for one in got),
        "waited_ms": statistics.median(one.get("waited_ms", 0.0) for one in got),
    }  # fmt: skip


def time_workloads(
    up: dict[str, Contender], shape: Shape, rounds: int
) -> Iterator[tuple[Finding, dict[str, Any]]]:
    """Time the workloads of interpretability, one request each but for sweeps."""
    ours = {name: up[name] for name in ("ours", "local") if name in up}
    for name, workload in WORKLOADS.items():
        if rounds > 1:
            in_turns(ours, 2, "workload", lambda *_, name=name: (name,))
        answers = in_turns(ours, rounds, "workload", lambda *_, name=name: (name,))
        for who, got in answers.items():
            if who == "ours" or "ours" not in answers:
                samples = [one["s"] * 1e6 for one in got]
                beside = [one["s"] * 1e6 for one in answers.get("local", ()) if who == "ours"]
                title = f"{workload.title}, {shape.title}"
                beside_title = TITLES["local"] if beside else ""
                key = f"{name}, {shape.title}"
                row = {"who": TITLES[who], "load": workload.title, "shape": shape.title}
                row |= {"link_bytes": statistics.median(one["link_bytes"] for one in got)}
                yield Finding(key, title, samples, beside, beside_title, bool(beside)), row


def memory_of(up: dict[str, Contender], shape: Shape) -> list[dict[str, Any]]:
    """Return the peak memory of each contender's ranks."""
    rows = []
    for name, one in up.items():
        peaks = one.ask("peak_bytes")["peak_bytes"]
        ranks = peaks[: shape.stages * shape.tp] if name in ("ours", "plain", "compiled") else peaks
        rows.append({"shape": shape.title, "who": TITLES[name], "peak_bytes": ranks[: shape.stages
                    * shape.tp]})  # fmt: skip
    return rows


def markdown(cells: list[dict[str, Any]], memory: list[dict[str, Any]]) -> str:
    """Return the tables that rows of time do not show."""
    lines = []
    for cell in cells:
        if "ms" in cell:
            figures = [cell[name] for name in ("ms", "p90_ms", "requests_per_s", "tokens_per_s")]
            crossed = [f"{cell['link_bytes']:,.0f}", shown(cell["waited_ms"])]
            what = f"{cell['load']}, {cell['shape']}"
            lines.append([what, cell["who"], *map(shown, figures), *crossed])
    head = ["what", "who", "ms", "p90", "requests/s", "tokens/s", "link bytes", "ms waited"]
    parts = [table(head, lines)]
    crossed = [cell for cell in cells if "ms" not in cell and cell["link_bytes"]]
    lines = [[one["load"], one["shape"], f"{one['link_bytes']:,.0f}"] for one in crossed]
    if lines:
        parts.append(table(["workload", "shape", "bytes over the link"], lines))
    lines = [
        [one["shape"], one["who"], ", ".join(f"{size >> 20}" for size in one["peak_bytes"])]
        for one in memory
    ]
    parts.append(table(["shape", "who", "peak MiB of each rank"], lines))
    return "\n\n".join(parts)


def options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--model", choices=MODELS, help="default: smollm2, with --quick tiny")
    parser.add_argument("--shapes", help="default: 1x1,2x1,3x1,1x3; with --quick 2x1")
    parser.add_argument("--in-flight", help="default: 1,4,16; with --quick 1,4")
    parser.add_argument("--prompts", help="words; default: 16,128,512; with --quick 16,128")
    parser.add_argument("--tokens", type=int, help="default: 16, with --quick 4")
    parser.add_argument("--rounds", type=int, help="default: 8, with --quick 1")
    parser.add_argument("--parts", default="loads,workloads")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    given = parser.parse_args()
    usual = {"model": "smollm2", "shapes": "1x1,2x1,3x1,1x3", "in_flight": "1,4,16",
             "prompts": "16,128,512", "tokens": 16, "rounds": 8}  # fmt: skip
    quick = {"model": "tiny", "shapes": "2x1", "in_flight": "1,4", "prompts": "16,128",
             "tokens": 4, "rounds": 1}  # fmt: skip
    for name, value in (quick if given.quick else usual).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def main() -> int:
    given = options()
    if not given.quick:
        _say(f"{LENS} is left out: {_why_without_lens()}")
    found, cells, memory, text = [], [], [], ""
    for name in given.shapes.split(","):
        shape = Shape(*map(int, name.split("x")))
        with ExitStack() as stack:
            up = start(stack, shape, MODELS[given.model](), quick=given.quick)
            loads = loads_of(shape, given) if "loads" in given.parts.split(",") else []
            for number, load in enumerate(loads, 1):
                _say(f"{shape.title}, {number}/{len(loads)}: {load.title} ...")
                rows, figures = time_load(up, shape, load, given.rounds)
                found += rows
                cells += figures
            if "workloads" in given.parts.split(","):
                _say(f"{shape.title}: workloads ...")
                for row, figure in time_workloads(up, shape, given.rounds):
                    found.append(row)
                    cells.append(figure)
            memory += memory_of(up, shape)
        text = markdown(cells, memory)
        if given.json is not None:  # a later shape may fail
            write_json(given.json, found, text, {"cells": cells, "memory": memory})
    print(f"{text}\n\n{rows_of_time(found)}\n\n{environment()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
