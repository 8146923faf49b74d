"""What each rank does in the tests of `GlooLink`. Run by `harness.ranks.Ranks`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.location import Location
from nnsight_pp.core.standing import Standing
from nnsight_pp.interleave.extension import plain_tensors
from nnsight_pp.parallel import gloo_link, gloo_peer
from nnsight_pp.parallel.gloo_link import GlooLink, new_group
from nnsight_pp.parallel.lazy import pick
from nnsight_pp.parallel.publications import Publications
from nnsight_pp.wire.value_codec import decode, encode

PLACE = Location("model.layers.3", "output")
OTHER = Location("model.layers.4", "output")


class Pair(NamedTuple):
    hidden: torch.Tensor
    rest: Any


def make_link(
    rank: int,
    count: int,
    *,
    bound_s: float = 10.0,
    most_bytes: int = 1 << 30,
    is_plain: bool = True,
) -> GlooLink:
    group = new_group([range(count)], rank)
    return GlooLink(
        rank,
        range(count),
        group,
        Publications(
            [peer for peer in range(count) if peer != rank],
            pick,
            standing_of=lambda request: Standing(3, 2, 5, f"{request} is on stage {rank}"),
            plain=plain_tensors() if is_plain else None,
        ),
        encode=encode,
        decode=decode,
        bound_s=bound_s,
        most_bytes=most_bytes,
        ran=f"stage {rank}",
    )


@contextmanager
def linked(rank: int, count: int, **options: Any) -> Iterator[GlooLink]:
    """Give a link; at the end all ranks stop theirs, and no thread of it may be left."""
    link = make_link(rank, count, **options)
    yield link
    dist.barrier()
    link.stop()
    assert link.join(5), "threads are left after stop"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("nnsight_pp")]
    assert not left, left


def until(is_so: Callable[[], bool], bound_s: float = 5.0) -> None:
    deadline = time.monotonic() + bound_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        value = call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"nothing was raised, got {value!r}")


def values() -> list[Any]:
    return [
        torch.arange(6).reshape(2, 3),
        Pair(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), None),
        {"h": torch.ones(2, 0, 3), "n": 7, "t": (torch.tensor(True), torch.tensor(2.5).half())},
        None,
        torch.arange(1_500_000, dtype=torch.float32),  # 6 MB: a second message
        torch.ones(4, 6).T[1:, ::2],
        [torch.zeros(16 * 1024 - 100, dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16)],
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other))
    return one == other


def every_value_crosses(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        for number, value in enumerate(values()):
            link.publish(AskKey("r", number), PLACE, value)
        for peer in range(count):
            if peer == rank:
                continue
            for at_once in (False, True):
                pulls = [
                    link.pull(AskKey("r", n), peer, PLACE, 0, (), at_once=at_once)
                    for n in range(len(values()))
                ]
                for pending, value in zip(pulls, values(), strict=True):
                    assert same(pending.wait(), value)
            row = link.pull(AskKey("r", 1), peer, PLACE, 0, (0, -1, slice(1, 3)))
            assert same(row.wait(), values()[1].hidden[-1, 1:3])
        traffic = link.statistics()["traffic"]
        assert all(one["bytes_received"] > 6_000_000 for one in traffic.values())


def a_part_moves_only_the_part(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        link.publish(AskKey("r", 0), PLACE, torch.ones(1000, 1000))
        peer = (rank + 1) % count
        assert same(link.pull(AskKey("r", 0), peer, PLACE, 0, (-1,)).wait(), torch.ones(1000))
        dist.barrier()
        received = sum(one["bytes_received"] for one in link.statistics()["traffic"].values())
        assert received < 4000 * count + 5000


def a_pull_waits_until_it_is_published(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        if rank == 0:
            until(lambda: link.statistics()["waiting"] == count - 1)
            dist.barrier()
            link.publish(AskKey("r", 4), PLACE, torch.ones(3))
        else:
            pending = link.pull(AskKey("r", 4), 0, PLACE, 2, (0,))
            assert not pending.is_resolved
            dist.barrier()
            assert same(pending.wait(), torch.tensor(1.0))
        dist.barrier()
        assert link.statistics()["waiting"] == 0


def a_closed_step_is_out_of_order(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        if rank == 0:
            link.publish(AskKey("r", 0), PLACE, 1)
            until(lambda: link.statistics()["waiting"] == 2 * (count - 1))
            link.close("r", 1)
        else:
            early = link.pull(AskKey("r", 1), 0, PLACE, 1, ())
            later = link.pull(AskKey("r", 2), 0, PLACE, 2, ())
            name, text = raised(early.wait)
            assert name == "OutOfOrderError"
            assert "model.layers.3.output#1" in text
            assert raised(link.pull(AskKey("r", 3), 0, PLACE, 0, ()).wait)[0] == "OutOfOrderError"
            assert link.pull(AskKey("r", 0), 0, PLACE, 0, ()).wait() == 1
            assert not later.is_resolved
        dist.barrier()
        if rank == 0:
            link.close("r", 2)


def what_cannot_be_sent_is_an_error(rank: int, count: int) -> None:
    with linked(rank, count, most_bytes=5000) as link:
        if rank == 0:
            link.publish(AskKey("r", 0), PLACE, threading.Lock())
            link.publish(AskKey("r", 1), PLACE, torch.zeros(3000))
            link.publish(AskKey("r", 2), PLACE, torch.zeros(2))
            link.fail("failed", "ValueError: no")
            link.publish(AskKey("late", 0), PLACE, 1)
            link.release("late")
        dist.barrier()
        if rank:
            for key, picks, said in (
                (AskKey("r", 0), (), "pickle"),
                (AskKey("r", 1), (), "12"),
                (AskKey("r", 2), (5,), "IndexError"),
                (AskKey("failed", 0), (), "ValueError: no"),
                (AskKey("late", 1), (), "over"),
            ):
                name, text = raised(link.pull(key, 0, PLACE, 0, picks).wait)
                assert name == "ValueUnavailableError"
                assert said in text, text
            assert same(link.pull(AskKey("r", 1), 0, PLACE, 0, (0,)).wait(), torch.tensor(0.0))


def another_question_under_the_same_number_diverges(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        link.publish(AskKey("r", 0), PLACE if rank == 0 else OTHER, 1)
        if rank:
            name, text = raised(link.pull(AskKey("r", 0), 0, OTHER, 0, ()).wait)
            assert name == "RankDivergenceError"
            assert str(PLACE) in text
            assert str(OTHER) in text


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def a_malformed_message_costs_a_line(rank: int, count: int) -> None:
    seen = _Lines()
    gloo_peer.log.addHandler(seen)
    gloo_peer.log.propagate = False
    try:
        with linked(rank, count) as link:
            peer = link._peers[1 - rank]
            if rank == 0:
                noise = torch.full((gloo_peer.FRAME_BYTES,), 200, dtype=torch.uint8)

                def send_noise() -> Any:
                    dist.send(noise, 1, group=link._group)
                    raise ValueError("not a message")

                # On the writer's thread, like every message.
                peer.send(99, lambda: (b"", []))
                peer.send(gloo_link._ANSWER, lambda: (b"no head", []))
                peer.send(gloo_link._ASK, lambda: (b"", [torch.zeros(3).byte()]))
                peer.send(gloo_link._ASK, lambda: [][0])
                peer.send(gloo_link._ASK, send_noise)
                until(lambda: len(seen.lines) >= 2)
                link.publish(AskKey("r", 0), PLACE, 5)
            else:
                until(lambda: len(seen.lines) >= 4)
                assert link.pull(AskKey("r", 0), 0, PLACE, 0, ()).wait() == 5
    finally:
        gloo_peer.log.removeHandler(seen)


def released_everywhere_leaves_nothing(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        link.publish(AskKey("r", 0), PLACE, torch.ones(3))
        dist.barrier()
        for peer in range(count):
            if peer != rank:
                link.pull(AskKey("r", 0), peer, PLACE, 0, ()).wait()
        never = link.pull(AskKey("r", 9), (rank + 1) % count, PLACE, 5, ())
        link.release("r")
        link.release("r")
        gauges = ("shelves", "published", "waiting", "pending")
        until(lambda: all(link.statistics()[gauge] == 0 for gauge in gauges))
        assert not never.is_resolved
        link.close("r", 7)
        link.fail("r", "x")
        link.publish(AskKey("r", 1), PLACE, 1)
        assert all(link.statistics()[gauge] == 0 for gauge in gauges)


def many_pulls_in_all_directions(rank: int, count: int, num: int) -> None:
    with linked(rank, count, bound_s=15.0) as link:
        peers = [peer for peer in range(count) if peer != rank]
        pulls = [
            (n, link.pull(AskKey(f"r{n % 7}", n), peer, PLACE, 0, (), at_once=n % 3 == 0))
            for n in range(num)
            for peer in peers
        ]
        for n in range(num):  # half of the questions are here already
            size = 30_000 if n % 50 == 0 else 20
            link.publish(AskKey(f"r{n % 7}", n), PLACE, torch.full((size,), float(n)))
        for n, pending in pulls:
            value = pending.wait()
            assert float(value[0]) == n
            assert len(value) in (20, 30_000)
        assert link.statistics()["pending"] == 0


def a_busy_forward_thread_keeps_nobody_waiting(rank: int, count: int) -> None:
    with linked(rank, count) as link:
        link.publish(AskKey("r", 0), PLACE, torch.ones(3))
        dist.barrier()
        if rank == 0:
            time.sleep(1.0)
        else:
            start = time.perf_counter()
            for _ in range(20):
                link.pull(AskKey("r", 0), 0, PLACE, 0, (), at_once=True).wait()
            assert time.perf_counter() - start < 0.8


def a_peer_that_stopped_answers_nothing(rank: int, count: int) -> None:
    link = make_link(rank, count)
    if rank == 0:
        link.release("r")
        dist.barrier()
        link.stop()
        dist.barrier()
    else:
        dist.barrier()
        for at_once in (True, False):
            before = link.pull(AskKey("r2", 0), 0, PLACE, 0, (), at_once=at_once)
            name, text = raised(before.wait)
            assert (name, "stopped" in text or "sending" in text) == ("ValueUnavailableError", True)
        after = link.pull(AskKey("r2", 1), 0, PLACE, 0, ())
        assert raised(after.wait)[0] == "ValueUnavailableError"
        link.release("r")
        assert link.statistics()["shelves"] == 0
        dist.barrier()
        link.stop()
    assert link.join(5)


def a_timeout_says_who_did_not_answer(rank: int, count: int) -> None:
    with linked(rank, count, bound_s=0.2) as link:
        if rank:
            name, text = raised(link.pull(AskKey("r", 0), 0, PLACE, 3, ()).wait)
            assert name == "PullTimeoutError"
            assert "Stage 0" in text
            assert "| open, r is on stage 0 | open, waits for model.layers.3.output#3 of" in text
            assert "<-- waiting here" in text
        dist.barrier()
        link.release("r")
        until(lambda: link.statistics()["shelves"] == 0)


def a_stage_whose_threads_stand_still_has_no_answer(rank: int, count: int) -> None:
    go_on = threading.Event()
    with linked(rank, count, bound_s=30.0 if rank == 0 else 1.5) as link:
        if rank == 0:
            ask = link._own.ask

            def stand_still(question: Any, reply: Any) -> None:
                go_on.wait(60)
                ask(question, reply)

            link._own.ask = stand_still  # type: ignore[method-assign]
            link.publish(AskKey("r", 0), PLACE, 7)
            dist.barrier()
            dist.barrier()
            go_on.set()
            dist.barrier()
        else:
            dist.barrier()
            name, text = raised(link.pull(AskKey("r", 0), 0, PLACE, 3, ()).wait)
            assert (name, "no answer" in text) == ("PullTimeoutError", True), text
            name, text = raised(link.pull(AskKey("r", 0), 0, PLACE, 3, ()).wait)
            assert "within 1 s" in text, "who comes next waits for less"
            dist.barrier()
            assert link.pull(AskKey("r", 0), 0, PLACE, 3, ()).wait() == 7
            dist.barrier()


def a_peer_dies(rank: int, count: int) -> str:
    link = make_link(rank, count)
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)
        os._exit(3)
    pending = [link.pull(AskKey("r", n), 0, PLACE, 0, (), at_once=n > 2) for n in range(5)]
    start = time.perf_counter()
    names = {raised(one.wait)[0] for one in pending}
    assert time.perf_counter() - start < 5
    assert names == {"ValueUnavailableError"}
    for at_once in (False, True):
        late = link.pull(AskKey("r", 9), 0, PLACE, 0, (), at_once=at_once)
        assert raised(late.wait)[0] == "ValueUnavailableError"
    link.release("r")
    link.stop()
    assert link.join(5)
    assert link.statistics()["shelves"] == 0
    return "survived"
