"""What each rank does in the tests of `Lane`: whole tensors, asked for where a line waits."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.link_scenarios import OTHER, PLACE, linked, make_link, raised, same, until, values
from nnsight_pp.core.ask import AskKey
from nnsight_pp.parallel import gloo_peer
from nnsight_pp.parallel.lane import DTYPES
from nnsight_pp.parallel.pulled import FIRST_INPUT, pick

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.parallel.gloo_link import GlooLink

KEY = AskKey("r", 0)


def pulled(
    link: GlooLink,
    owner: int,
    key: AskKey = KEY,
    place: Any = PLACE,
    step: int = 0,
    picks: Sequence[Any] = (),
) -> Any:
    """Pull a value, or a part of it, for a line that waits."""
    return link.pull(key, owner, place, step, picks, at_once=True).wait()


def asked_in_python(link: GlooLink) -> list[AskKey]:
    """Return a list that grows by what the interpreter is asked for on this rank."""
    asked: list[AskKey] = []
    ask = link._own.ask

    def noted(question: Any, reply: Any) -> None:
        asked.append(question.key)
        ask(question, reply)

    link._own.ask = noted  # type: ignore[method-assign]
    return asked


def whole_tensors_cross_by_themselves(rank: int, count: int) -> None:
    tensors = [torch.arange(24).reshape(2, 3, 4).to(dtype) for dtype in DTYPES]
    # In the frame, just, and just not; the largest body that a receive waits for, and a larger one.
    tensors += [torch.arange(n).to(torch.uint8) for n in (1, 16_300, 16_400, 1 << 20, 1 << 20 | 1)]
    tensors += [torch.tensor(2.5), torch.arange(1_500_000.0).reshape(3, 1, -1)]
    with linked(rank, count) as link:
        asked = asked_in_python(link)
        for number, value in enumerate(tensors):
            link.publish(AskKey("r", number), PLACE, value)
        dist.barrier()
        for peer in range(count):
            for number, value in enumerate(tensors) if peer != rank else ():
                pending = link.pull(AskKey("r", number), peer, PLACE, 0, (), at_once=True)
                got = pending.wait()
                assert same(got, value)
                assert got.shape == value.shape
                assert pending.bytes_received == value.nbytes
                with torch.inference_mode():
                    other = pulled(link, peer, AskKey("r", number))
                assert not other.is_inference()
                got.zero_()  # it is the asker's own
                assert same(other, value)
        dist.barrier()
        assert asked == [], "the interpreter was asked"
        for one in link.statistics()["traffic"].values():
            least = 2 * sum(value.nbytes for value in tensors)
            assert least < one["bytes_received"] < least + 20_000
            assert least < one["bytes_sent"] < least + 20_000


_ALL = slice(None)
# Parts of a tensor [4, 3, 5] that cross by themselves, each by the picks in their order.
PARTS: list[tuple[Any, ...]] = [
    (0,), (-1,), (3, -3), (1, 2, 4), ((1, 2),), ((-1, _ALL, 2),), ((1, 2, 3),), (_ALL,), ((),),
    (slice(1, 3),), (slice(-2, None),), (slice(None, -1), 0), (slice(0, 100, 3),),
    (slice(1, None, 2), slice(1, 2), -1), ((_ALL, slice(1)),), ((_ALL, _ALL, slice(0, 4, 2)), 1),
    (slice(2, 3, 1 << 30),), (slice(-100, 2), (1, slice(-2, 9))), ((_ALL, 0, 0), slice(1, 3)),
]  # fmt: skip
# These go the way through Python, and so do errors.
OTHERS: list[tuple[Any, ...]] = [
    (slice(3, 1),), (None,), (...,), ((..., 0),), (True,), ([0, 2],), (torch.tensor([1, 2]),),
    ((1,),),
]  # fmt: skip
REFUSED: list[tuple[Any, ...]] = [
    (4,), (-5,), ((0, 3),), (0, 0, 0, 0), ((0, 0, 0, 0),), (slice(0, 2, -1),), ("x",), (1.0,),
]  # fmt: skip


def parts_cross_by_themselves(rank: int, count: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128]
    tensors = [torch.arange(60).reshape(4, 3, 5).to(dtype) for dtype in dtypes]
    large = torch.arange(3_000_000.0).reshape(3, 1000, 1000)
    several = (tensors[0], None, [tensors[1]], tensors[3])
    with linked(rank, count) as link:
        asked = asked_in_python(link)
        call = ((tensors[0], 2), {"x": tensors[1]}), ((), {"hidden": tensors[3]}), ((3,), {})
        for number, value in enumerate([*tensors, large, several, list(several), *call]):
            link.publish(AskKey("r", number), PLACE, value)
        dist.barrier()
        peer = (rank + 1) % count

        def part(number: int, *picks: Any) -> Any:
            return pulled(link, peer, AskKey("r", number), picks=picks)

        for number, value in enumerate(tensors):
            for picks in PARTS:
                got = part(number, *picks)
                assert same(got, pick(value, picks)), picks
                got.zero_()
                assert same(part(number, *picks), pick(value, picks))
        for picks in ((1,), (2, slice(0, 300)), ((0, slice(7), 7),), ((_ALL, _ALL, 5),)):
            assert same(part(5, *picks), pick(large, picks))
        for number in (6, 7):
            assert same(part(number, 0, -1), tensors[0][-1])
            assert same(part(number, 3), tensors[3])
        assert same(part(8, FIRST_INPUT, 2), tensors[0][2])
        assert same(part(9, FIRST_INPUT), tensors[3])
        dist.barrier()
        assert asked == [], "the interpreter was asked"
        dist.barrier()
        for picks in OTHERS:
            assert same(part(0, *picks), pick(tensors[0], picks)), picks
        for picks in REFUSED:
            name, text = raised(lambda picks=picks: part(0, *picks))
            at_home = raised(lambda picks=picks: pick(tensors[0], picks))
            assert name == "ValueUnavailableError", picks
            assert at_home[0] in text, (picks, text)
        assert part(6, 1) is None
        assert part(6, 2, 0).shape == (4, 3, 5)
        assert same(part(6, -1, 1), tensors[3][1])
        assert part(10, FIRST_INPUT) == 3
        for number, picks in (
            (6, ((0,),)),
            (6, (4,)),
            (6, ((),)),
            (8, (0, 1, 0)),
            (0, (FIRST_INPUT,)),
        ):
            assert (
                raised(lambda n=number, picks=picks: part(n, *picks))[0] == "ValueUnavailableError"
            )
        dist.barrier()
        assert asked
        link.release("r")
        until(lambda: link.statistics()["published"] == 0)
        assert link._own.plain is not None
        assert link._own.plain.count() == 0


def an_owner_that_keeps_the_interpreter_answers(rank: int, count: int) -> None:
    """It keeps the interpreter until it is told that the answer came."""
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    path = Path(str(box[0])) / "told"
    if rank == 0:
        os.mkfifo(path)
    with linked(rank, count) as link:
        link.publish(KEY, PLACE, torch.full((70_000,), 3.0))
        dist.barrier()
        if rank == 0:
            pipe = os.open(path, os.O_RDWR)
            told = ctypes.create_string_buffer(1)
            assert ctypes.PyDLL(None).read(pipe, told, 1) == 1  # a `PyDLL` lets nobody else run
        else:
            for _ in range(50):
                assert float(pulled(link, 0)[-1]) == 3.0
                assert float(pulled(link, 0, picks=(slice(1, None, 2), -1))) == 3.0
            path.write_bytes(b"x")


def what_the_lane_does_not_know_python_answers(rank: int, count: int) -> None:
    with linked(rank, count, most_bytes=5000) as link:
        asked = asked_in_python(link)
        if rank == 0:
            others = [*values()[:4], torch.ones(4, 6).T, torch.ones(0), torch.ones(2).conj()]
            for number, value in enumerate(others[1:]):
                link.publish(AskKey("other", number), PLACE, value)
            link.publish(KEY, PLACE, torch.ones(3))
            link.publish(AskKey("r", 1), PLACE, torch.zeros(3000))
            link.fail("failed", "ValueError: no")
            link.close("closed", 3)
            until(lambda: link.statistics()["waiting"] == count - 1)
            dist.barrier()
            link.publish(AskKey("r", 5), PLACE, torch.full((2,), 5.0))
        else:
            for number in range(3):
                assert same(pulled(link, 0, AskKey("other", number)), values()[1 + number])
            assert same(pulled(link, 0, AskKey("other", 3)), torch.ones(4, 6).T)
            assert pulled(link, 0, AskKey("other", 4)).numel() == 0
            for key, place, name, said in (
                (AskKey("r", 1), PLACE, "ValueUnavailableError", "12"),
                (AskKey("failed", 0), PLACE, "ValueUnavailableError", "ValueError: no"),
                (AskKey("closed", 0), PLACE, "OutOfOrderError", "ran past it"),
                (KEY, OTHER, "RankDivergenceError", str(PLACE)),
            ):
                error = raised(lambda key=key, place=place: pulled(link, 0, key, place))
                assert (error[0], said in error[1]) == (name, True), error
            later = link.pull(AskKey("r", 5), 0, PLACE, 9, (), at_once=True)
            assert not later.is_resolved
            dist.barrier()
            assert same(later.wait(), torch.full((2,), 5.0))
            assert link.statistics()["pending"] == 0
        dist.barrier()
        assert bool(asked) == (rank == 0)


def nothing_of_a_request_is_left(rank: int, count: int) -> None:
    with linked(rank, count, bound_s=0.3) as link:
        table, peer = link._own.plain, (rank + 1) % count
        lane = link._peers[peer].lane
        assert table is not None
        assert lane is not None
        for number in range(3):
            link.publish(AskKey("r", number), PLACE, torch.ones(3))
        assert table.count() == 3
        link.publish(AskKey("r", 2), OTHER, torch.ones(5))  # it takes the place of the other
        link.publish(AskKey("r", 3), OTHER, torch.ones(5))
        link.publish(AskKey("r", 3), OTHER, "no tensor")
        assert table.count() == 3
        dist.barrier()
        for owner in range(count):
            if owner != rank:
                assert len(pulled(link, owner, AskKey("r", 2), OTHER)) == 5
                link.let_go("r", owner, [(0, 0), (1, None)])
        until(lambda: table.count() == 1)
        never = link.pull(AskKey("r", 9), peer, PLACE, 5, (), at_once=True)
        assert raised(never.wait)[0] == "PullTimeoutError"
        assert lane.traffic()[2] == 1
        dist.barrier()
        link.publish(AskKey("r", 9), PLACE, torch.ones(1))  # nobody waits for it any more
        dist.barrier()
        link.pull(AskKey("r", 8), peer, PLACE, 5, (), at_once=True)
        link.release("r")
        gauges = ("shelves", "published", "waiting", "pending")
        until(lambda: all(link.statistics()[gauge] == 0 for gauge in gauges))
        link.publish(AskKey("r", 4), PLACE, torch.ones(3))
        assert (table.count(), lane.traffic()[2]) == (0, 0)


def one_side_has_no_extension(rank: int, count: int) -> None:
    for plain_rank in (0, 1):
        with linked(rank, count, is_plain=rank == plain_rank) as link:
            for number, value in enumerate(values()):
                link.publish(AskKey("r", number), PLACE, value)
            dist.barrier()
            for number, value in enumerate(values()):
                assert same(pulled(link, 1 - rank, AskKey("r", number)), value)


def a_signal_is_handled_while_a_line_waits(rank: int, count: int) -> None:
    class InterruptError(Exception):
        pass

    def handle(*_: object) -> None:
        raise InterruptError

    with linked(rank, count, bound_s=20.0) as link:
        if rank:
            before = signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                assert raised(lambda: pulled(link, 0))[0] == "InterruptError"
            finally:
                signal.signal(signal.SIGALRM, before)
        dist.barrier()
        link.release("r")


def a_malformed_head_costs_a_line(rank: int, count: int) -> None:
    lines: list[str] = []
    key = b"r\x000\x00" + str(PLACE).encode()
    error = gloo_peer.log.exception
    gloo_peer.log.exception = lambda text, *args: lines.append(text % args)  # type: ignore[method-assign]
    try:
        with linked(rank, count) as link:
            if rank == 0:
                for kind, head in (
                    (gloo_peer.PLAIN_ASK, b"short"),
                    (gloo_peer.PLAIN_ASK, bytes(19) + b"no key"),
                    (gloo_peer.PLAIN_ASK, bytes(17) + b"\x09\x00too few numbers"),
                    (gloo_peer.PLAIN_ASK, bytes(16) + b"\x09\x00\x00" + key),
                    (gloo_peer.PLAIN_ANSWER, b"short"),
                    (gloo_peer.PLAIN_ANSWER, bytes(9) + b"\x02" + bytes(8)),
                    (gloo_peer.PLAIN_ANSWER, bytes(10)),
                ):
                    link._peers[1].post(kind, lambda head=head: (head, []))
                # Well formed, but nobody has asked.
                link._peers[1].post(
                    gloo_peer.PLAIN_ANSWER, lambda: (b"\x77" + bytes(9), [torch.ones(4).byte()])
                )
                link.publish(KEY, PLACE, torch.ones(2))
            else:
                until(lambda: len(lines) == 7)
                assert set(lines) == {"a malformed message from stage 0 was dropped"}
                assert pulled(link, 0).sum() == 2
    finally:
        gloo_peer.log.exception = error  # type: ignore[method-assign]


def an_answer_with_an_unknown_body_loses_the_peer(rank: int, count: int) -> None:
    """The threads of both are left in gloo: run it last."""
    link = make_link(rank, count)
    if rank == 0:
        noise = [torch.zeros(20_000, dtype=torch.uint8)]
        link._peers[1].post(gloo_peer.PLAIN_ANSWER, lambda: (bytes(9) + b"\x02", noise))
    else:
        name, text = raised(lambda: pulled(link, 0))
        assert (name, "malformed" in text) == ("ValueUnavailableError", True), text
    dist.barrier()
