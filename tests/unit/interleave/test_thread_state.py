"""A worker's torch state and the driver's stay apart, whatever either has entered."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension

extension = load_extension()
state = thread_state.load()


@pytest.fixture(autouse=True, params=["words", "full_snapshots"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways of exchanging must pass everything: a newer torch gets the second."""
    previous = extension.set_full_snapshots(request.param == "full_snapshots")
    yield request.param
    extension.set_full_snapshots(previous)


def park(*values: Any) -> Any:
    return greenlet.getcurrent().parent.switch(*values)


class Worker:
    """A block with its slot, driven by hand."""

    def __init__(self, block: Callable[..., Any], *, grad_enabled: bool = True) -> None:
        self.slot = state.new_slot(grad_enabled)
        self.greenlet = greenlet.greenlet(block)

    def switch(self, *args: Any) -> Any:
        return state.switch(self.slot, self.greenlet, args)

    def throw(self, exception: BaseException | type[BaseException]) -> Any:
        return state.throw(self.slot, self.greenlet, exception)


def filled(args: Any, value: torch.Tensor) -> Any:
    if isinstance(args, (tuple, list)):
        return type(args)(filled(arg, value) for arg in args)
    return value if isinstance(args, Lazy) else args


class Lazy:
    """Parks inside the torch call that meets it, then computes with what it was served."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*filled(args, park()), **(kwargs or {}))


class PassingFunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class PassingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class ParkingDispatchMode(TorchDispatchMode):
    """Parks below the dispatcher, where torch remembers the key set of the call."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        park()
        return func(*args, **(kwargs or {}))


class AutocastDtype:
    """Sets an autocast dtype with no autocast around it."""

    def __enter__(self) -> None:
        self.before = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.float16)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_dtype("cpu", self.before)


class Stashed:
    """An object of Python that torch keeps per thread."""

    def __enter__(self) -> None:
        torch._C._stash_obj_in_tls("nnsight_pp_test", [1])

    def __exit__(self, *_: object) -> None:
        torch._C._remove_obj_from_tls("nnsight_pp_test")


CONTEXTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_uncached": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "autocast_dtype": AutocastDtype,
    "function_mode": PassingFunctionMode,
    "dispatch_mode": PassingDispatchMode,
    "fake_mode": FakeTensorMode,
    "device": lambda: torch.device("cpu"),
    "no_torch_function": torch._C.DisableTorchFunction,
    "no_subclasses": torch._C.DisableTorchFunctionSubclass,
    "saved_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "no_saved_hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "one_thread_backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "no_forward_grad": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
    "below_autograd": torch._C._AutoDispatchBelowAutograd,
    "stashed": Stashed,
}
if hasattr(torch.autograd.graph, "node_creation_hook"):  # since torch 2.14
    CONTEXTS["node_hook"] = lambda: torch.autograd.graph.node_creation_hook(lambda node: None)


def observe() -> tuple[Any, ...]:
    """What Python sees of its thread, and every word that the extension compares."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_enabled(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        extension.words(),
    )


def in_new_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


CLEAN = in_new_thread(observe)
# The first one imports for a second.
FakeTensorMode()


# ---- what each side sees ---------------------------------------------------------------------


@pytest.mark.parametrize("entered_by_driver", CONTEXTS)
def test_neither_side_sees_what_the_other_entered(entered_by_driver: str) -> None:
    for entered_by_worker in CONTEXTS:
        check_pair(CONTEXTS[entered_by_driver], CONTEXTS[entered_by_worker])


def check_pair(enter_driver: Callable[[], Any], enter_worker: Callable[[], Any]) -> None:
    seen: list[tuple[Any, ...]] = []

    def block() -> str:
        seen.append(observe())
        with enter_worker():
            seen.append(observe())
            park()
            seen.append(observe())
            park()
            seen.append(observe())
        seen.append(observe())
        park()
        seen.append(observe())
        return "done"

    worker = Worker(block)
    outside = observe()
    with enter_driver():
        inside = observe()
        worker.switch()
        assert observe() == inside
        worker.switch()
        assert observe() == inside
    assert observe() == outside
    worker.switch()
    assert observe() == outside
    with enter_driver():
        assert worker.switch() == "done"
        assert observe() == inside
    assert observe() == outside

    new, entered, *parked, left, last = seen
    assert new == left == last == CLEAN
    assert parked == [entered, entered]
    assert worker.slot.is_clean


@pytest.mark.parametrize("entered", [name for name in CONTEXTS if name != "none"])
def test_the_contexts_of_these_tests_change_something(entered: str) -> None:
    with CONTEXTS[entered]():
        inside = observe()
    assert inside != CLEAN


def test_new_worker_has_the_grad_mode_it_was_given() -> None:
    def block() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with torch.inference_mode():
        assert Worker(block, grad_enabled=True).switch() == (True, False)
        assert Worker(block, grad_enabled=False).switch() == (False, False)


def test_inference_tensor_of_the_model_is_read_and_not_made_by_a_worker() -> None:
    made = Worker(lambda: torch.ones(2))
    with torch.inference_mode():
        assert torch.ones(2).is_inference()
        assert not made.switch().is_inference()


def test_slot_is_clean_until_its_worker_leaves_something() -> None:
    def block() -> None:
        park()
        with torch.no_grad():
            park()
        park()

    worker = Worker(block)
    found = [worker.slot.is_clean]
    for _ in range(4):
        worker.switch()
        found.append(worker.slot.is_clean)
    assert found == [True, True, False, True, True]


# ---- how a worker comes back -----------------------------------------------------------------


@pytest.mark.parametrize("entered", CONTEXTS)
def test_driver_is_restored_when_the_worker_dies(entered: str) -> None:
    def block() -> None:
        # Entered and never left, as by a C++ frame that an exception does not unwind.
        contexts.append(CONTEXTS[entered]())
        contexts[-1].__enter__()
        park()
        raise ValueError("line 3")

    contexts: list[Any] = []
    worker = Worker(block)
    before = observe()
    worker.switch()
    with pytest.raises(ValueError, match="line 3"):
        worker.switch()
    assert worker.greenlet.dead
    assert observe() == before
    assert worker.slot.is_clean


@pytest.mark.parametrize("entered", CONTEXTS)
def test_driver_is_restored_after_throw(entered: str) -> None:
    seen: list[Any] = []

    def block() -> None:
        try:
            with CONTEXTS[entered]():
                seen.append(observe())
                try:
                    park()
                finally:
                    seen.append(observe())
        finally:
            seen.append(observe())

    worker = Worker(block)
    worker.switch()
    with torch.no_grad():
        before = observe()
        with pytest.raises(KeyError, match="unwound"):
            worker.throw(KeyError("unwound"))
        assert observe() == before
    assert worker.greenlet.dead
    assert seen == [seen[0], seen[0], CLEAN]


def test_throw_takes_a_class_and_reaches_a_worker_that_never_started() -> None:
    worker = Worker(lambda: None)
    with pytest.raises(RuntimeError):
        worker.throw(RuntimeError)
    assert worker.greenlet.dead

    started = Worker(park)
    started.switch()
    assert isinstance(started.throw(greenlet.GreenletExit), greenlet.GreenletExit)
    assert started.greenlet.dead


def test_worker_that_catches_what_was_thrown_goes_on() -> None:
    def block() -> str:
        with torch.no_grad():
            try:
                park()
            except ValueError:
                park("caught")
            return "ended"

    worker = Worker(block)
    worker.switch()
    assert worker.throw(ValueError()) == "caught"
    assert torch.is_grad_enabled()
    assert worker.switch() == "ended"


def test_a_worker_may_drive_another() -> None:
    def inner() -> bool:
        with torch.inference_mode():
            park()
            return torch.is_inference_mode_enabled()

    def outer() -> tuple[bool, bool]:
        with torch.no_grad():
            worker = Worker(inner)
            worker.greenlet.parent = greenlet.getcurrent()
            worker.switch()
            park()
            return worker.switch(), torch.is_inference_mode_enabled()

    worker = Worker(outer)
    before = observe()
    worker.switch()
    assert observe() == before
    assert worker.switch() == (True, False)


def test_modes_of_a_worker_are_freed_with_it() -> None:
    def block() -> None:
        mode = PassingFunctionMode()
        kept.append(weakref.ref(mode))
        mode.__enter__()
        del mode
        park()

    kept: list[weakref.ref[Any]] = []
    worker = Worker(block)
    worker.switch()
    assert kept[0]() is not None
    worker.throw(greenlet.GreenletExit)
    gc.collect()
    assert kept[0]() is None


def test_switches_leak_no_references() -> None:
    token = object()
    worker = Worker(lambda first: [park(first) for _ in range(100)])
    before = sys.getrefcount(token)
    for _ in range(101):
        worker.switch(token)
    assert worker.greenlet.dead
    assert sys.getrefcount(token) <= before + 1  # the block's own argument may still live


# ---- parks inside torch ----------------------------------------------------------------------


def test_model_warns_while_a_worker_is_parked_inside_torch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    worker = Worker(lambda: torch.ones_like(Lazy()))
    worker.switch()
    assert not worker.slot.is_clean
    extension.warn("from a binding without a handler")
    torch.ones(8) @ torch.ones(8)
    assert worker.switch(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    assert "from a binding without a handler" in capfd.readouterr().err


def test_warning_inside_the_parked_call_still_becomes_a_python_warning() -> None:
    class Warns(Lazy):
        @classmethod
        def __torch_function__(cls, func: Any, *_: Any, **__: Any) -> Any:
            park()
            extension.warn("inside the call")
            return torch.zeros(1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = Worker(lambda: torch.ones_like(Warns()))
        worker.switch()
        torch.ones_like(torch.ones(2))
        worker.switch()
    assert any("inside the call" in str(warning.message) for warning in caught)


def test_workers_parked_in_torch_ops_come_back_in_the_order_they_parked() -> None:
    """pybind11 keeps a per-thread list of C++ frames; without the exchange this aborts."""
    workers = [Worker(lambda: torch.ops.aten.relu(Lazy())) for _ in range(3)]
    for worker in workers:
        worker.switch()
        assert extension.words()["pybind_frame"] == 0
    torch.ops.aten.relu(torch.ones(1))
    for worker in workers:
        assert worker.switch(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_worker_parked_below_the_dispatcher_does_not_change_the_models_dispatch() -> None:
    def block() -> list[float]:
        with ParkingDispatchMode():
            return (torch.ones(2) + torch.ones(2)).tolist()

    first, second = Worker(block), Worker(block)
    first.switch()
    second.switch()
    assert extension.words()["entry_keys"] == (0, 0, 0)
    with PassingDispatchMode(), torch.inference_mode():
        assert (torch.ones(2) * 3).tolist() == [3.0, 3.0]
    results: list[Any] = [None, None]
    while not (first.greenlet.dead and second.greenlet.dead):
        for i, worker in enumerate((first, second)):
            if not worker.greenlet.dead:
                results[i] = worker.switch()
    assert results == [[2.0, 2.0], [2.0, 2.0]]


def test_workers_parked_inside_vmap_do_not_meet() -> None:
    def block(scale: float) -> list[float]:
        def inner(row: torch.Tensor) -> torch.Tensor:
            park()
            return row.sum() * scale

        return torch.func.vmap(inner)(torch.ones(3, 2)).tolist()

    workers = [Worker(block) for _ in range(3)]
    for scale, worker in enumerate(workers):
        worker.switch(float(scale))
    assert torch.func.vmap(lambda row: row + 1)(torch.zeros(2, 1)).tolist() == [[1.0], [1.0]]
    assert [worker.switch() for worker in workers] == [[0.0] * 3, [2.0] * 3, [4.0] * 3]


def test_workers_parked_inside_a_backward_pass_finish_their_own() -> None:
    """torch keeps one queue of backward work per thread; without the exchange this hangs."""

    def block(scale: float) -> list[float]:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            inside.append(greenlet.getcurrent())
            return grad * park()

        x = torch.full((2,), scale, requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()
        return x.grad.tolist()

    def model_runs_backward() -> list[float]:
        weight = torch.ones(2, requires_grad=True)
        (weight * 3).sum().backward()
        return weight.grad.tolist()

    inside: list[greenlet.greenlet] = []
    workers = [Worker(block) for _ in range(3)]
    for worker in workers:
        worker.switch(1.0)
        assert model_runs_backward() == [3.0, 3.0]
    assert [worker.switch(factor) for factor, worker in enumerate(workers)] == [
        [0.0, 0.0],
        [2.0, 2.0],
        [4.0, 4.0],
    ]
    assert inside == [worker.greenlet for worker in workers]
    assert model_runs_backward() == [3.0, 3.0]


def test_autocast_nesting_counts_for_each_side_alone() -> None:
    def block() -> None:
        with torch.autocast("cpu"):
            park()
            with torch.autocast("cpu"):
                park()

    worker = Worker(block)
    worker.switch()
    worker.switch()
    with torch.autocast("cpu"):
        assert extension.words()["autocast_nesting"] == 1
        worker.switch()
    assert extension.words()["autocast_nesting"] == 0


def test_dynamos_frame_callback_is_not_the_workers() -> None:
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

    def block() -> list[Any]:
        found = [set_eval_frame(False)]
        park()
        return [*found, set_eval_frame(None)]

    worker = Worker(block)
    worker.switch()
    assert set_eval_frame(None) is None
    set_eval_frame(False)
    try:
        result = worker.switch()
    finally:
        found = set_eval_frame(None)
    assert result == [None, False]
    assert found is False


# ---- against the plain round trip ------------------------------------------------------------

# The words that a plain at::ThreadLocalState and the warning handler cover.
COVERED = ("warning_handler", "included", "excluded", "autograd", "function_state", "held")


def covered() -> list[Any]:
    words = extension.words()
    return [*observe()[:-1], *(words[name] for name in COVERED)]


def random_block(seed: int, log: list[Any]) -> Callable[[], None]:
    chance = random.Random(seed)
    # These forbid what the block does: lazy values, numbers, other hooks.
    unfit = {"fake_mode", "no_torch_function", "no_subclasses", "no_saved_hooks"}
    names = sorted(set(CONTEXTS) - unfit)

    def nested(depth: int) -> None:
        with CONTEXTS[chance.choice(names)]():
            for _ in range(chance.randint(1, 3)):
                # The handler is an address, another one in each run.
                log.append((seed, [*observe()[:-1], *covered()[-5:]]))
                if chance.random() < 0.4:
                    log.append(torch.relu(Lazy()).float().tolist())
                elif depth < 3:
                    nested(depth + 1)
                else:
                    park()

    return lambda: nested(0)


def drive(seed: int, switch: Callable[[int, greenlet.greenlet, tuple[Any, ...]], Any]) -> list[Any]:
    """Run 8 workers in random turns; return what each of them saw, in order."""
    chance = random.Random(seed)
    log: list[Any] = []
    workers = {i: greenlet.greenlet(random_block(100 * seed + i, log)) for i in range(8)}
    started: set[int] = set()
    num_switches = 0
    while workers and num_switches < 400:
        i = chance.choice(sorted(workers))
        with CONTEXTS[chance.choice(["none", "no_grad", "inference", "dispatch_mode"])]():
            before = covered()
            served = (torch.tensor([-1.0, float(i)]),) if i in started else ()
            switch(i, workers[i], served)
            assert covered() == before
            assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
        started.add(i)
        num_switches += 1
        if workers[i].dead:
            del workers[i]
    assert not workers
    return log


@pytest.mark.parametrize("seed", range(3))
def test_random_workers_see_the_same_as_with_plain_snapshots(seed: int) -> None:
    slots = [state.new_slot(True) for _ in range(8)]
    ours = drive(seed, lambda i, worker, args: state.switch(slots[i], worker, args))

    kept = [in_new_thread(extension.capture) for _ in range(8)]

    def plain_switch(i: int, worker: greenlet.greenlet, args: tuple[Any, ...]) -> None:
        driver = extension.capture()
        extension.install(kept[i])
        try:
            worker.switch(*args)
        finally:
            kept[i] = extension.capture()
            extension.install(driver)

    assert ours == drive(seed, plain_switch)


# ---- misuse, the opt-out, the stream ---------------------------------------------------------


def test_a_running_worker_cannot_be_switched_to() -> None:
    def block() -> None:
        with pytest.raises(RuntimeError, match="running already"):
            worker.switch()

    worker = Worker(block)
    worker.switch()
    assert worker.greenlet.dead


def test_arguments_of_another_type_are_refused() -> None:
    slot, worker = state.new_slot(True), greenlet.greenlet(park)
    with pytest.raises(TypeError, match="Slot"):
        state.switch(None, worker, ())
    with pytest.raises(TypeError, match="greenlet"):
        state.switch(slot, None, ())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="args_tuple"):
        state.switch(slot, worker, [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="exception"):
        state.throw(slot, worker, "no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        state.new_slot()  # pyright: ignore[reportCallIssue]


def test_everything_that_torch_hides_was_found() -> None:
    assert extension.unseen == []
    assert torch.__version__.startswith(extension.torch_version)


def test_opting_out_switches_plainly_and_forbids_parks_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NNSIGHT_PP_TLS_SWAP", "0")
    plain = thread_state.load()
    assert (plain.name, plain.may_park_in_torch) == ("plain", False)
    assert state.may_park_in_torch

    def block() -> list[bool]:
        seen = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        with torch.no_grad():
            park()
            seen.append(torch.is_grad_enabled())
        return [*seen, torch.is_grad_enabled()]

    slot, worker = plain.new_slot(True), greenlet.greenlet(block)
    with torch.inference_mode():
        plain.switch(slot, worker, ())
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert not slot.is_clean
    assert plain.switch(slot, worker, ()) == [True, False, False, True]

    slot, worker = plain.new_slot(True), greenlet.greenlet(block)
    plain.switch(slot, worker, ())
    with pytest.raises(ValueError, match="unwound"):
        plain.throw(slot, worker, ValueError("unwound"))
    assert torch.is_grad_enabled()


def test_stream_that_a_worker_left_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: the two calls into torch.cuda are played by a variable."""
    now = [(0, 0, 1)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(thread_state, "_current_stream", lambda: now[0])
    monkeypatch.setattr(thread_state, "_set_stream", lambda stream: now.__setitem__(0, stream))
    # Not state.switch, which is wrapped already where torch is built for CUDA.
    switch = thread_state._keeping_stream(extension.switch)

    def block() -> None:
        park(now[0])
        now[0] = (7, 0, 1)
        park(now[0])
        seen = now[0]
        now[0] = (0, 0, 1)
        park(seen)

    slot, worker = state.new_slot(True), greenlet.greenlet(block)
    assert switch(slot, worker, ()) == (0, 0, 1)
    assert switch(slot, worker, ()) == (7, 0, 1)
    assert now[0] == (0, 0, 1)
    assert not slot.is_clean
    assert switch(slot, worker, ()) == (7, 0, 1)
    now[0] = (5, 0, 1)
    switch(slot, worker, ())
    assert now[0] == (5, 0, 1)
    assert worker.dead
    assert slot.is_clean
