"""What a rank keeps of a request whose reports are gone: nothing, without collecting cycles."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

pytest.importorskip("vllm")

from nnsight_pp.core.block import Block
from nnsight_pp.core.location import Location
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.engines.vllm.conflicts import Made, conflict_of, in_one_order
from nnsight_pp.engines.vllm.homecoming import located, make_change
from nnsight_pp.engines.vllm.ledger import Ledger
from nnsight_pp.engines.vllm.traced_request import TracedRequest
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.remote import RemoteAsk
from nnsight_pp.interleave.worker import current_worker
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.parallel.memory_link import MemoryFabric, MemoryLink
from nnsight_pp.parallel.owners import StageMap
from nnsight_pp.wire.block_codec import BlockMessage, encode_block, encode_blocks

FAR, NEAR = Location("far", "output"), Location("near", "output")


class Far:
    """A module of stage 1, as a block on stage 0 sees it."""

    @property
    def output(self) -> Any:
        worker = current_worker("far")
        assert worker.turns is not None
        return worker.turns.read(worker, FAR)


class Near:
    """A module of stage 0, as a block there sees it."""

    @property
    def input(self) -> Any:
        return self._read("input")

    @property
    def output(self) -> Any:
        return self._read("output")

    def _read(self, kind: str) -> Any:
        worker = current_worker("near")
        assert worker.turns is not None
        return worker.turns.read(worker, NEAR._replace(kind=kind))


def a_rank(fabric: MemoryFabric) -> tuple[Interleaver, Ledger]:
    switch: Any = thread_state.load()
    order = [[NEAR._replace(kind="input"), NEAR], [FAR]]
    owners = StageMap([["near"], ["far"]], [["near"], ["far"]], ["near", "far"], order=order)
    link = MemoryLink(fabric, 0, bound_s=1.0)
    turns = Interleaver(StepClock(), switch, owners=owners, link=link, make_lazy=LazyRemoteTensor)
    residents: Any = SimpleNamespace(take_given=list, bound=lambda *_: {})
    past_edits: Any = SimpleNamespace()
    object_of = {"near": Near, "far": Far}
    return turns, Ledger(
        turns, switch, lambda name: object_of[name](), 0, link, residents, past_edits
    )


def asks_alive() -> list[Any]:
    return [one for one in gc.get_objects() if type(one) is RemoteAsk]


def test_what_a_block_has_saved_goes_with_its_request():
    fabric = MemoryFabric(2, lambda value, _: value, lambda value: value)
    turns, ledger = a_rank(fabric)
    source = "    got = {}.save()\n    got[0] = far.output\n"
    message = BlockMessage("trace", Block("user.py", 1, source, "run"), {"far": Far()})
    data = encode_block(message, lambda obj: "far" if type(obj) is Far else None)
    before = len(asks_alive())
    gc.disable()
    try:
        traced = ledger.add(TracedRequest("request", "trace", 1), data)
        turns.open_step("request", 0)
        assert traced.worker is not None
        assert traced.worker.has_ended
        assert traced.worker.error is None
        report = ledger.close(traced, None)
        assert list(report.saved) == ["got"]
        assert len(asks_alive()) == before + 1
        ledger.forget(traced)
        del report, traced
        assert len(asks_alive()) == before
    finally:
        gc.enable()
        fabric.close()


def bind_anew() -> int:
    global NUMBER
    NUMBER += 1.5
    return 1


NUMBER = 0.5


@pytest.mark.parametrize(("text", "is_refused"), [("bind() + NUMBER", True), ("bind()", False)])
def test_a_global_name_that_a_function_binds_and_the_block_looks_up(text: str, is_refused: bool):
    fabric = MemoryFabric(2, lambda value, _: value, lambda value: value)
    turns, ledger = a_rank(fabric)
    names = {"bind": bind_anew, **({"NUMBER": NUMBER} if is_refused else {})}
    message = BlockMessage("t", Block("user.py", 1, f"    got = {text}\n", "run"), names)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        data = encode_block(message, lambda value: None)
        traced = ledger.add(TracedRequest("request", "t", 1), data)
        turns.open_step("request", 0)
        report = ledger.close(traced, None)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        fabric.close()
    assert (report.failure is not None) == is_refused
    assert report.failure is None or "bind_anew has bound the global name" in report.failure.text


def test_blocks_of_one_parcel_share_their_objects_and_each_change_is_told_once():
    turns, ledger = a_rank(MemoryFabric(2, lambda value, _: value, lambda value: value))
    log: list[str] = []
    texts = {"edit": "log.append('edit')", "own": "seen = len(log).save(); log.append('own')"}
    messages = [
        BlockMessage(name, Block("user.py", 1, f"    {text}\n", "run"), {"log": log})
        for name, text in texts.items()
    ]
    parcel = [TracedRequest(name, name, 1) for name in texts]
    ledger.prepare_parcel(parcel, encode_blocks(messages, lambda _: None))
    for one in parcel:
        ledger.add(one, b"")
        turns.open_step(one.request, 0)
    for traced in parcel:
        ledger.end(traced, None)
    edit, own = (ledger.close(traced, None) for traced in parcel)
    assert (own.saved, own.grown) == ({"seen": 1}, {})
    assert edit.grown == {"log": [((), ("list", {}, ["edit", "own"]))]}
    for traced in parcel:
        ledger.forget(traced)


def test_a_parcel_that_cannot_be_read_fails_all_of_its_requests():
    _, ledger = a_rank(MemoryFabric(2, lambda value, _: value, lambda value: value))
    parcel = [TracedRequest(name, name, 1) for name in ("edit", "own")]
    ledger.prepare_parcel(parcel, b"no pickle")
    found = [ledger.close(ledger.add(one, b""), None) for one in parcel]
    assert [one.failure.is_echo for one in found if one.failure is not None] == [False, True]
    for traced in parcel:
        ledger.forget(traced)


def test_what_several_requests_put_into_one_list_comes_home_in_the_order_of_the_model():
    fabric = MemoryFabric(2, lambda value, _: value, lambda value: value)
    turns, ledger = a_rank(fabric)
    rows, firsts = ["old"], {"old": 0}
    texts = [
        "rows.append('0'); near.output; rows.extend(['0 out', '0 too']); firsts[0] = 1;"
        " far.output; rows.append('0 far')",
        "near.input; rows.append('1 in'); firsts[1] = 1; near.output; rows.append('1 out');"
        " far.output; rows.append('1 far')",
    ]
    names = {"rows": rows, "firsts": firsts, "near": Near(), "far": Far()}
    messages = [
        BlockMessage(
            f"t{seat}", Block("user.py", 1, f"    {text}\n", "run"), dict(names), seat=seat
        )
        for seat, text in enumerate(texts)
    ]
    for request, message in zip("ab", messages, strict=True):
        data = encode_block(message, lambda obj: {Near: "near", Far: "far"}.get(type(obj)))
        traced = ledger.add(TracedRequest(request, message.trace, 1), data)
        assert traced.worker is not None
        traced.worker.cut = WholeCut()
    for request in "ab":
        turns.open_step(request, 0)
    turns.serve(NEAR._replace(kind="input"), torch.zeros(1))
    turns.serve(NEAR, torch.zeros(1))
    made = []
    for request, message in zip("ab", messages, strict=True):
        traced = ledger.get(request)
        assert traced is not None
        report = ledger.close(traced, None)
        assert report.failure is None
        made += [
            Made(request, message, name, *one)
            for name, changes in report.grown.items()
            for one in located(names[name], changes)
        ]
        ledger.forget(traced)
    fabric.close()
    assert conflict_of(made, list(zip("ab", messages, strict=True))) is None
    for target, change in in_one_order(made):
        make_change(target, change)
    assert rows == ["old", "0", "1 in", "0 out", "0 too", "1 out", "0 far", "1 far"]
    assert list(firsts) == ["old", 1, 0]
