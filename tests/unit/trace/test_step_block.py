"""The `with` form of loops over steps."""

import pytest
import torch

from fakes.nets import Net, batch
from nnsight_pp import NNsight, NNsightDeprecationWarning, save

X = batch(2)


def several_passes(model, count):
    def call(value):
        for number in range(count):
            value_of_all = model._module(value + number)
        return value_of_all

    return call


@pytest.fixture
def model():
    return NNsight(Net())


def test_the_body_runs_once_per_step_and_warns(model):
    with pytest.warns(NNsightDeprecationWarning, match=r"for step in tracer\.iter"):
        with model.trace(X, fn=several_passes(model, 3)) as tracer:
            seen = save([])
            with tracer.iter[:3] as step:
                seen.append((step, model.output.clone()))
    assert [step for step, _ in seen] == [0, 1, 2]
    assert torch.equal(seen[2][1], model._module(X + 2))


def test_a_name_bound_in_the_body_is_there_after_it(model):
    with pytest.warns(NNsightDeprecationWarning):
        with model.trace(X, fn=several_passes(model, 2)) as tracer:
            with tracer.iter[:2]:
                out = model.output
            kept = save(out)
    assert torch.equal(kept, model._module(X + 1))


def test_the_block_goes_on_where_the_run_has_fewer_steps(model):
    with pytest.warns((NNsightDeprecationWarning, UserWarning)):
        with model.trace(X, fn=several_passes(model, 2)) as tracer:
            seen = save([])
            with tracer.iter[:]:
                seen.append(model.output)
            after = save([len(seen)])
    assert len(seen) == 2
    assert after == [2]


def test_an_exception_of_the_body_leaves_the_block(model):
    with pytest.warns(NNsightDeprecationWarning), pytest.raises(ZeroDivisionError):
        with model.trace(X) as tracer:
            with tracer.iter[:1]:
                value = 1 / 0
