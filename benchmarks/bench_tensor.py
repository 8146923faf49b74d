"""What ranks that split a layer cost: one joined read, and a model that nobody looks at.

    python -m benchmarks.bench_tensor [--quick] [--json FILE]

A read is timed on two ranks of vLLM's own group, from a worker that asks for it to the model that
goes on, beside vLLM's gather of the same bytes. The rest runs two engines of two ranks on a random
Qwen2, ours and plain vLLM with the same arguments, in turns. Needs `make model` for a tokenizer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender_process import Contender, in_turns, start_pair
from benchmarks.engine_arguments import engine_arguments
from benchmarks.findings import Finding, main
from benchmarks.loads import Load
from benchmarks.local_models import SMOLLM2
from benchmarks.two_processes import samples_of_two

# Rows of a decoding batch, and of a prompt; columns of q, k and v of a small model.
ROWS = (1, 64)
QUERY, SHARED = 576, 192
NUM_READS = 50


def findings(*, quick: bool) -> list[Finding]:
    """Return one finding for each size of a read, and for each number of requests in flight."""
    return [*_reads(3 if quick else 40), *_untouched(quick=quick)]


# ---- one joined read ---------------------------------------------------------------------------


def _reads(rounds: int) -> list[Finding]:
    samples = samples_of_two(_rank, rounds)
    return [
        Finding(
            f"joined_read_{rows}",
            f"read q, k and v of {rows} rows, joined over 2 ranks",
            samples[rows][0],
            samples[rows][1],
            "vLLM's gather of the same bytes",
        )
        for rows in ROWS
    ]


def _rank(rank: int, store: str, pipe: Connection, rounds: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[-1 - rank]])
    with _group_of_two(rank, store):
        samples = {rows: _samples(rows, rounds) for rows in ROWS}
        torch.distributed.barrier()
    if rank == 0:
        pipe.send(samples)
    os._exit(0)


@contextmanager
def _group_of_two(rank: int, store: str) -> Iterator[None]:
    """Let this process be one of two tensor-parallel ranks, as a rank of an engine is.

    Source: vllm 0.32.0 v1/worker/cpu_worker.py:init_device names the ranks' shared memory; without
    the name and the kernels, `CpuCommunicator` goes through gloo.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as groups
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    os.environ["VLLM_DIST_IDENT"] = Path(store).parent.name
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = 2
    with set_current_vllm_config(config):
        groups.init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
        groups.initialize_model_parallel(2)
        yield


def _samples(rows: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of a joined read and of a gather, taken in turns on both ranks."""
    from nnsight_pp.core.location import Location
    from nnsight_pp.core.rows import Rows, TokenCut
    from nnsight_pp.engines.vllm.tensor_group import TensorGroup
    from nnsight_pp.interleave import thread_state
    from nnsight_pp.interleave.clock import StepClock
    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.worker import Worker
    from nnsight_pp.parallel.joined import Parts
    from nnsight_pp.parallel.parts import ColumnGroup, Columns

    group = TensorGroup()
    rule = Columns((ColumnGroup(QUERY), ColumnGroup(SHARED), ColumnGroup(SHARED)))
    places = [Location(f"model.layers.{at}.qkv_proj", "output") for at in range(NUM_READS)]
    parts = Parts(group, dict.fromkeys(places, (rule, None)))
    switch: Any = thread_state.load()
    turns = Interleaver(StepClock(), switch, joiner=parts)
    value = torch.randn(rows, (QUERY + 2 * SHARED) // 2)

    def read_all() -> None:
        for place in places:
            turns.asks.read(worker, place)

    worker: Any = None

    def served() -> None:
        nonlocal worker
        worker = Worker("request", read_all, __file__, switch.new_slot(True))
        worker.cut = TokenCut(Rows(0, rows, rows))
        turns.add(worker)
        turns.open_step("request", 0)
        for place in places:
            turns.serve(place, (value, None))
        turns.close_step("request", 0)
        assert worker.has_ended
        assert worker.error is None
        turns.drop("request")

    def gathered() -> None:
        for _ in places:
            group.gather(value)

    ours, theirs = [], []
    served()
    for _ in range(rounds):
        for step, kept in ((served, ours), (gathered, theirs)):
            torch.distributed.barrier()
            start = time.perf_counter_ns()
            step()
            kept.append((time.perf_counter_ns() - start) / 1000 / NUM_READS)
    return ours, theirs


# ---- a model that nobody looks at --------------------------------------------------------------


def _untouched(*, quick: bool) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        made = _random_qwen2(Path(folder) / "qwen2")
        ours, plain = engine_arguments(made, tp=2, longest=256)
        with ExitStack() as up:
            pair = start_pair(up, ("ours", ours), ("plain", plain), quick=quick)
            return [_generated(pair, count, 1 if quick else 16) for count in (1, 16)]


def _generated(pair: dict[str, Contender], count: int, num_pairs: int) -> Finding:
    load = Load("untraced", count)
    for number in (-1, -2):
        for one in pair.values():
            one.ask("run", load, number)
    got = in_turns(pair, num_pairs, "run", lambda _, number: (load, number))
    return Finding(
        f"untouched_tp_{count}",
        f"{load.tokens} tokens of {count} requests without a block, on 2 ranks",
        [1e6 * one["s"] for one in got["ours"]],
        [1e6 * one["s"] for one in got["plain"]],
        "plain vLLM on 2 ranks",
        True,
        1.01,
    )


def _random_qwen2(folder: Path) -> Path:
    """Write a random Qwen2 of eight layers, with SmolLM2's tokenizer."""
    from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

    if not SMOLLM2.is_dir():
        raise RuntimeError(f"{SMOLLM2} is wanted for its tokenizer: `make model` makes it")
    config = Qwen2Config(
        vocab_size=AutoConfig.from_pretrained(SMOLLM2).vocab_size,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMOLLM2 / name, folder / name)
    return folder


if __name__ == "__main__":
    raise SystemExit(main(findings, __doc__))
