"""What an engine that can trace costs while nobody does, against plain vLLM with its arguments.

    python -m benchmarks.bench_idle [--quick] [--model tiny] [--stages 1,2] [--modes eager,compiled]
        [--pairs 20] [--traces 1000] [--starts 3] [--json FILE]

Two engines of each kind live at once, each in a process of its own, and take turns in pairs. A busy
machine disturbs both of a pair alike, and each pair of turns gives one ratio. Starts take turns
too; a cold one finds no compiled code of vLLM's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.backends import MODELS
from benchmarks.contender_process import Contender, in_turns, start_pair
from benchmarks.engine_arguments import engine_arguments
from benchmarks.findings import Finding, markdown, write_json
from benchmarks.loads import Load
from benchmarks.timing import environment

IN_FLIGHT = (1, 4, 16)
PLAIN = "plain vLLM"
# Of an untraced request, and of an engine's start in seconds beyond plain vLLM's.
GOAL, GOAL_START_S = 1.01, 3.0
# What a trace of one value may add to a run of one token, in milliseconds.
GOAL_TRACE_MS = 5.0
EAGER, COMPILED = "eager", "compiled"


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _us(answers: list[dict[str, Any]]) -> list[float]:
    return [one["s"] * 1e6 for one in answers]


# ------------------------------------------------------------------------- our calls of a step


def own_calls(num_requests: int, rounds: int) -> Finding:
    """Time what our own code takes in a step without a block, on one rank.

    vLLM's own calls are replaced by empty ones, which are timed beside it.
    """
    from types import SimpleNamespace

    import torch

    from benchmarks.timing import difference_us
    from nnsight_pp.engines.vllm.forward import add_tracing
    from nnsight_pp.engines.vllm.ledger import Ledger
    from nnsight_pp.engines.vllm.side import RankSide
    from nnsight_pp.parallel.place import Place

    class Runner:
        """A model runner whose calls do nothing."""

        def get_model(self) -> Any:
            return torch.nn.Module()

        def execute_model(self, *_: Any, **__: Any) -> None:
            self._determine_batch_execution_and_padding(1, num_tokens=1)
            self._model_forward(input_ids=None, positions=None)

        def _determine_batch_execution_and_padding(self, *_: Any, **__: Any) -> None:
            pass

        def _model_forward(self, *_: Any, **__: Any) -> None:
            pass

        def sample_tokens(self, *_: Any, **__: Any) -> Any:
            return self._sample(None, None)

        def _sample(self, *_: Any, **__: Any) -> None:
            pass

    output = SimpleNamespace(
        scheduled_new_reqs=[], num_scheduled_tokens=dict.fromkeys(map(str, range(num_requests)), 1)
    )
    times = 100

    def steps(runner: Any) -> Any:
        def run() -> None:
            for _ in range(times):
                runner.execute_model(output, None)
                runner.sample_tokens(None)

        return run

    ours: Any = Runner()
    nobody: Any = None
    ledger = Ledger(nobody, nobody, nobody, 0, None, nobody, nobody)
    add_tracing(ours, RankSide(Place(0, 1, 0, 1), nobody, ledger, nobody, None), None)
    samples = [difference_us(steps(ours), steps(Runner()), 1) / times for _ in range(rounds)]
    return Finding(f"own_calls_{num_requests}", f"our own code in a step, {num_requests} in flight",
                   samples)  # fmt: skip


# ------------------------------------------------------------------------------- pairs of runs


def compare(mode: str, stages: int, given: argparse.Namespace) -> list[Finding]:
    """Return the rows of an engine of ours beside a plain one."""
    where = f"{mode}, {stages} stage{'s' if stages > 1 else ''}"
    _say(f"{where}: starting {'two' if given.quick else 'five'} engines ...")
    folder = MODELS[given.model]()
    ours, plain = engine_arguments(folder, stages=stages, eager=mode == EAGER)
    with ExitStack() as up:
        pair = start_pair(up, ("ours", ours), ("plain", plain), quick=given.quick)
        return list(_turns(pair, where, given))


def _turns(pair: dict[str, Contender], where: str, given: argparse.Namespace) -> Any:
    def turns(name: str, title: str, kinds: tuple[str, str], load: Load, goal: Any) -> Finding:
        loads = dict(zip(("ours", "plain"), kinds, strict=True))
        args = lambda who, number: (load._replace(kind=loads[who]), number)  # noqa: E731
        found = in_turns(pair, given.pairs, "run", args)
        return Finding(
            f"{name}, {where}", f"{title}, {where}", _us(found["ours"]), _us(found["plain"]),
            PLAIN, True, goal,
        )  # fmt: skip

    for one in () if given.quick else pair.values():
        for count in IN_FLIGHT:
            for _ in range(one.num_processes):
                one.ask("run", Load("untraced", count), -1)
    _serve_traces(pair["ours"], 5)
    untraced = ("untraced", "untraced")
    for count in IN_FLIGHT:
        _say(f"{where}: {count} in flight ...")
        title = f"untraced requests, {count} in flight"
        yield turns(f"idle_{count}", title, untraced, Load("untraced", count), GOAL)
    _say(f"{where}: traces ...")
    yield trace_adds(pair["ours"], where, 2 if given.quick else 80)
    if " 1 stage" not in where:
        yield turns("cross_adds", "a write on the last stage with a value of the first, per step",
                    ("cross", "untraced"), Load("cross"),
                    # Compiled, steps without a block are, and those with one are not.
                    1.1 if where.startswith(EAGER) else None)  # fmt: skip
    for size in (1, 10) if given.quick else (1, 10, 100):
        ours = {"ours": pair["ours"]}
        got = in_turns(ours, given.pairs, "collect", lambda *_, size=size: (size,))["ours"]
        copies = [one["copy_s"] * 1e6 for one in got]
        name = f"collect {size} MB of saves, {where}"
        yield Finding(f"collect_{size}, {where}", name, _us(got), copies, "a copy", True, 2.0)
    _serve_traces(pair["ours"], given.traces)
    title = f"untraced requests after {given.traces} traces, 1 in flight"
    yield turns("idle_after", title, untraced, Load("untraced"), GOAL)


def trace_adds(one: Contender, where: str, count: int) -> Finding:
    """Time what a trace adds to a run on the same engine; each engine has a pace of its own."""
    taken: dict[str, list[float]] = {"first": [], "untraced": []}
    for _ in range(one.num_processes):
        for kind, seconds in one.ask("trace_adds", count).items():
            taken[kind] += [second * 1e6 for second in seconds]
    pairs = zip(taken["first"], taken["untraced"], strict=True)
    more = statistics.median(traced - untraced for traced, untraced in pairs) / 1e3
    # Compiled, a step without a block is, and one with a block is not.
    goal = f" (goal {GOAL_TRACE_MS:g} ms)" if where.startswith(EAGER) else ""
    title = f"a trace of one value, {where}: {more:+.1f} ms over a run of one token{goal}"
    beside = "the same engine without a block"
    return Finding(f"trace_adds, {where}", title, taken["first"], taken["untraced"], beside, True)


def _serve_traces(one: Contender, count: int) -> None:
    for _ in range(one.num_processes):
        one.ask("traces", count)


# ------------------------------------------------------------------------------------- starts


def starts(mode: str, stages: int, count: int, model: str, *, cold: bool) -> Finding:
    """Time the start of an engine, from its arguments until it takes requests, imports apart."""
    kind = f"{'cold ' if cold else ''}start, {mode}, {stages} stage{'s' if stages > 1 else ''}"
    both = engine_arguments(MODELS[model](), stages=stages, eager=mode == EAGER)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(count):
        for who in ("ours", "plain") if number % 2 == 0 else ("plain", "ours"):
            _say(f"{kind}: {who}, {number + 1} of {count} ...")
            with tempfile.TemporaryDirectory() as cache:
                own = {"VLLM_CACHE_ROOT": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
                one = Contender(who, both[who == "plain"], environment=own if cold else None)
                seconds[who].append(one.seconds)
                one.close()
    ours, plain = ([one * 1e6 for one in seconds[who]] for who in ("ours", "plain"))
    more = statistics.median(one - other for one, other in zip(ours, plain, strict=True)) / 1e6
    title = f"{kind}: {more:+.1f} s over plain (goal {GOAL_START_S:g} s)"
    return Finding(kind, title, ours, plain, PLAIN, True)


def findings(given: argparse.Namespace) -> list[Finding]:
    """Return all rows."""
    found = [own_calls(count, 10 if given.quick else 300) for count in (1, 16)]
    for mode in given.modes.split(","):
        for stages in map(int, given.stages.split(",")):
            found += compare(mode, stages, given)
    most = max(map(int, given.stages.split(",")))
    if given.starts:
        found.append(starts(EAGER, most, given.starts, given.model, cold=False))
        if COMPILED in given.modes:
            found.append(starts(COMPILED, most, given.starts, given.model, cold=False))
            found.append(starts(COMPILED, most, 1, given.model, cold=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, one stage, few turns")
    parser.add_argument("--model", choices=MODELS, help="default: smollm2, with --quick tiny")
    parser.add_argument("--stages", help="default: 1,2; with --quick 1")
    parser.add_argument("--modes", help="default: eager,compiled; with --quick eager")
    parser.add_argument("--pairs", type=int, help="turns of each; default: 20, with --quick 1")
    parser.add_argument("--traces", type=int, help="default: 1000, with --quick 20")
    parser.add_argument("--starts", type=int, help="default: 3, with --quick 0")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    given = parser.parse_args()
    usual = {"model": "smollm2", "stages": "1,2", "modes": f"{EAGER},{COMPILED}"}
    quick = {"model": "tiny", "stages": "1", "modes": EAGER, "pairs": 1, "traces": 20, "starts": 0}
    usual = quick if given.quick else {**usual, "pairs": 20, "traces": 1000, "starts": 3}
    for name, value in usual.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    found = findings(given)
    print(f"{markdown(found)}\n\n{environment()}")
    if given.json is not None:
        write_json(given.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
