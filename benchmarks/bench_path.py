"""The path of a block across stages, piece by piece, without an engine around it.

    python -m benchmarks.bench_path [--quick] [--json FILE]

A pull is timed between two processes, in turns with what gloo alone takes: a small message there,
the same bytes back. Codecs are timed beside a copy of the same bytes in memory.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import greenlet
import torch
import torch.distributed as dist

from benchmarks.findings import Finding, main
from benchmarks.timing import difference_us
from benchmarks.two_processes import samples_of_two
from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.block import Block
from nnsight_pp.core.location import Location
from nnsight_pp.core.report import Report
from nnsight_pp.core.rows import Rows, TokenCut
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.extension import plain_tensors
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.worker import Worker
from nnsight_pp.parallel.gloo_link import GlooLink, new_group
from nnsight_pp.parallel.lazy import pick
from nnsight_pp.parallel.publications import Publications
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, encode_block
from nnsight_pp.wire.parcel import Parcel
from nnsight_pp.wire.report_codec import decode_reports, encode_reports
from nnsight_pp.wire.value_codec import decode, encode

PLACE = Location("model.layers.3", "output")
# What is pulled: the shape of the value, and the part of it.
PULLS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "4 KB": ((1 << 10,), ()),
    "4 KB, a row of 256 KB": ((1 << 6, 1 << 10), (-1,)),
    "256 KB": ((1 << 16,), ()),
    "16 MB": ((1 << 22,), ()),
}
REPORTS = {"1 MB": 1 << 20, "10 MB": 10 << 20, "100 MB": 100 << 20}
NUM_READS = 100


def findings(*, quick: bool) -> list[Finding]:
    """Return one finding for each piece of the path."""
    rounds = 3 if quick else 40
    return [
        _park_and_serve(rounds),
        _publish(rounds),
        *_pulls(rounds),
        _block_codec(rounds),
        *_reports(2 if quick else 8, ("1 MB", "10 MB") if quick else tuple(REPORTS)),
    ]


def _in_turns(step: Callable[[], Any], beside: Callable[[], Any], rounds: int) -> Any:
    """Return samples of both, in microseconds, taken in turns."""
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(difference_us(step, None, 1))
        theirs.append(difference_us(beside, None, 1))
    return ours, theirs


def _park_and_serve(rounds: int) -> Finding:
    """Time an engine's rank that serves one request's rows, beside a bare switch and a copy."""
    switch: Any = thread_state.load()
    locations = [Location(f"model.layers.{at}", "output") for at in range(NUM_READS)]
    value = torch.zeros(8, 64)
    turns = Interleaver(StepClock(), switch)

    def read_all() -> None:
        asks = turns.asks
        for location in locations:
            asks.read(worker, location)

    worker: Any = None

    def served() -> None:
        nonlocal worker
        worker = Worker("request", read_all, __file__, switch.new_slot(True))
        worker.cut = TokenCut(Rows(2, 3, 8))
        turns.add(worker)
        turns.open_step("request", 0)
        for location in locations:
            turns.serve(location, value)
        turns.close_step("request", 0)
        assert worker.has_ended
        assert worker.error is None
        turns.drop("request")

    def bare() -> None:
        parent = greenlet.getcurrent()
        other = greenlet.greenlet(lambda: [parent.switch() for _ in locations])
        for _ in range(NUM_READS + 1):
            other.switch()
        for _ in locations:
            value.narrow(0, 2, 3).clone()

    served()
    ours, theirs = _in_turns(served, bare, rounds)
    return Finding(
        "park_and_serve",
        "park and serve one request's rows",
        [one / NUM_READS for one in ours],
        [one / NUM_READS for one in theirs],
        "a bare switch and a copy of the rows",
    )


def _publish(rounds: int) -> Finding:
    own = Publications([1], pick)
    value, numbers = torch.zeros(64, 64), iter(range(10**9))

    def publish() -> None:
        for _ in range(NUM_READS):
            own.publish(AskKey("request", next(numbers)), PLACE, value.clone())

    def copy() -> None:
        kept = [value.clone() for _ in range(NUM_READS)]
        assert kept

    ours, theirs = _in_turns(publish, copy, rounds)
    return Finding(
        "publish",
        "publish 16 KB, its copy included",
        [one / NUM_READS for one in ours],
        [one / NUM_READS for one in theirs],
        "the copy",
    )


def _block_codec(rounds: int) -> Finding:
    block = Block("user.py", 10, "        h = layer.output + vector\n        h.save()\n", "run")
    names = {"vector": torch.zeros(576), "scale": 2.0, "layers": list(range(30))}
    message = BlockMessage("trace", block, names)

    def there_and_back() -> None:
        got = decode_block(encode_block(message, lambda _: None), lambda _: None)
        assert got.block == block

    ours, theirs = _in_turns(
        there_and_back, lambda: pickle.loads(pickle.dumps((block.source, names))), rounds
    )
    return Finding("block_codec", "encode and decode a block", ours, theirs, "pickle of its parts")


def _reports(rounds: int, sizes: tuple[str, ...]) -> list[Finding]:
    """Time what a rank and the client do about saves, the engine's messages between them apart.

    The client looks at each page of what it gets, which a mapping brings in only then.
    """
    parcel, found = Parcel(), []

    def dropped(_: bool) -> list[Any]:
        parcel.drop()
        return []

    def there_and_back(report: Report) -> Any:
        answer = pickle.loads(pickle.dumps(encode_reports([report], parcel)))
        return decode_reports([answer], dropped)[0].saved["kept"]

    def looked_at(report: Report) -> None:
        assert there_and_back(report)[:: mmap.PAGESIZE // 4].sum() > 0

    for size in sizes:
        report = Report("request", 0, saved={"kept": torch.ones(REPORTS[size] // 4)})
        ours, theirs = _in_turns(
            lambda report=report: looked_at(report),
            lambda report=report: report.saved["kept"].clone(),
            rounds,
        )
        title = f"encode and decode {size} of saves"
        found.append(Finding(f"report_{size}", title, ours, theirs, "a copy"))
    # As many tensors as 16 requests save of 30 layers in 16 steps.
    many = {(at, layer): torch.ones(1, 576) for at in range(256) for layer in range(30)}
    report = Report("request", 0, saved={"kept": many})

    ours, theirs = _in_turns(
        lambda: there_and_back(report), lambda: [one.clone() for one in many.values()], rounds
    )
    title = f"encode and decode {len(many):,} tensors of 2 KB"
    found.append(Finding("report_many", title, ours, theirs, "a copy of each"))
    return found


# ---- between two processes ---------------------------------------------------------------------


def _pulls(rounds: int) -> list[Finding]:
    samples = samples_of_two(_rank, rounds)
    return [
        Finding(f"pull_{size}", f"pull {size}", *samples[size], "gloo: a message there, it back")
        for size in PULLS
    ]


def _rank(rank: int, store: str, pipe: Connection, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    raw = dist.new_group([0, 1], backend="gloo")
    link = GlooLink(
        rank, (0, 1), new_group([(0, 1)], rank),
        Publications([1 - rank], pick, plain=plain_tensors()),
        encode=encode, decode=decode, bound_s=60.0, most_bytes=1 << 30, ran=f"stage {rank}",
    )  # fmt: skip
    if rank == 0:
        _answer(link, raw, rounds)
    else:
        pipe.send(_ask(link, raw, rounds))
    dist.barrier()
    link.stop()
    link.join(5.0)
    os._exit(0)  # gloo's own threads may be in a receive that nothing ends


def _answer(link: GlooLink, raw: Any, rounds: int) -> None:
    number = 0
    for shape, picks in PULLS.values():
        value, asked = torch.ones(shape), torch.zeros(16)
        part = pick(value, picks)
        for _ in range(rounds):
            link.publish(AskKey("request", number), PLACE, value)
            number += 1
        dist.barrier()
        for _ in range(rounds):
            dist.recv(asked, 1, group=raw)
            dist.send(part, 1, group=raw)


def _ask(link: GlooLink, raw: Any, rounds: int) -> dict[str, Any]:
    samples: dict[str, Any] = {}
    number = 0
    for name, (shape, picks) in PULLS.items():
        into, asked = torch.zeros(pick(torch.empty(shape), picks).shape), torch.zeros(16)
        ours, theirs = [], []
        dist.barrier()
        for _ in range(rounds):
            start = time.perf_counter_ns()
            got = link.pull(AskKey("request", number), 0, PLACE, 0, picks, at_once=True).wait()
            middle = time.perf_counter_ns()
            dist.send(asked, 0, group=raw)
            dist.recv(into, 0, group=raw)
            theirs.append((time.perf_counter_ns() - middle) / 1000)
            ours.append((middle - start) / 1000)
            assert torch.equal(got, into)
            number += 1
        samples[name] = (ours, theirs)
    return samples


if __name__ == "__main__":
    raise SystemExit(main(findings, __doc__))
