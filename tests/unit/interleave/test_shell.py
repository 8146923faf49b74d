# A greenlet that ran one block runs the next, and nothing of the first is left in it.
import contextvars
import gc
import threading
import weakref

import pytest
import torch
from greenlet import getcurrent

from fakes.nets import Net, batch
from nnsight_pp import NNsight
from nnsight_pp.errors import BlockError
from nnsight_pp.interleave import shell

X = batch(2)
VARIABLE = contextvars.ContextVar("variable", default="outside")


@pytest.fixture
def model():
    shell._kept.clear()
    return NNsight(Net())


def shell_of(model):
    found = []
    with model.trace(X):
        found.append(getcurrent())
        model.layers[0].output
    return found[0]


def test_next_block_runs_in_the_same_greenlet(model):
    first = shell_of(model)
    assert first.is_idle
    assert shell_of(model) is first


def test_blocks_that_run_side_by_side_have_their_own(model):
    found = []
    with model.trace() as tracer:
        for _ in range(3):
            with tracer.invoke(X):
                found.append(getcurrent())
                model.layers[0].output
    assert len({id(one) for one in found}) == 3
    assert len(shell._kept) == 3


def test_nothing_of_an_ended_block_is_kept(model):
    class Thing:
        pass

    kept = []
    with model.trace(X):
        thing = Thing()
        kept.append(weakref.ref(thing))
        VARIABLE.set(thing)
        model.layers[0].output
        raised = None
    with pytest.raises(ValueError, match="on purpose"), model.trace(X):
        other = Thing()
        kept.append(weakref.ref(other))
        model.layers[0].output
        raise ValueError("on purpose")
    gc.collect()
    assert [one() for one in kept] == [None, None]
    assert shell._kept


def test_context_variable_of_one_block_is_not_seen_by_the_next(model):
    with model.trace(X):
        VARIABLE.set("inside")
        model.layers[0].output
    with model.trace(X):
        seen = VARIABLE.get().save()
        model.layers[0].output
    assert seen == "outside"


def test_grad_mode_that_a_block_leaves_is_not_that_of_the_next(model):
    with model.trace(X):
        model.layers[0].output
        torch.set_grad_enabled(False)
    with model.trace(X):
        is_enabled = torch.is_grad_enabled().save()
        model.layers[0].output
    assert is_enabled
    assert torch.is_grad_enabled()


def test_block_that_raises_gives_its_greenlet_back(model):
    with pytest.raises(ValueError, match="on purpose"), model.trace(X):
        model.layers[0].output
        raise ValueError("on purpose")
    assert len(shell._kept) == 1
    assert shell._kept[0].is_idle


def test_block_that_catches_everything_keeps_its_greenlet_to_itself(model):
    found = []
    with pytest.raises(BlockError, match="went on after its request was over"):
        with model.trace(X, fn="rollout"):
            found.append(getcurrent())
            count = 0
            while True:
                try:
                    model.head.output
                except Exception:
                    count += 1
    assert shell._kept == []
    assert not found[0].is_idle
    found[0].throw()  # nobody else would end it


def test_driver_far_below_the_start_gets_another_one(model, monkeypatch):
    first = shell_of(model)
    begin = first.begin
    monkeypatch.setattr(shell, "_stack_address", lambda: lambda: begin - 100_000)
    assert shell_of(model) is not first


def test_another_thread_keeps_none(model):
    found = []
    thread = threading.Thread(target=lambda: found.append(shell_of(model)))
    thread.start()
    thread.join()
    assert found[0].dead
    assert shell._kept == []


def test_nested_run_of_another_model_has_its_own(model):
    other, found = NNsight(Net(3)), []
    with model.trace(X):
        found.append(getcurrent())
        model.layers[0].output
        with other.trace(X):
            found.append(getcurrent())
            other.layers[0].output
        model.layers[1].output
    assert found[0] is not found[1]
    assert shell_of(model).is_idle
