"""With the exchange of thread-local state off, a park inside a torch call is refused."""

from __future__ import annotations

import pytest
import torch

from nnsight_pp import NNsight, ParkRefusedError


class Reading:
    """Reads a value of the model in the middle of a torch call."""

    def __init__(self, node):
        self.node = node

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*[arg.node.output if isinstance(arg, cls) else arg for arg in args])


@pytest.fixture
def model():
    return NNsight(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()))


def run(model):
    reading = Reading(model[0])
    with model.trace(torch.ones(1, 3)):
        first = torch.relu(reading).save()
        second = model[1].output.save()
    return first, second


def test_park_inside_a_torch_call_is_right_with_the_exchange(model):
    first, second = run(model)
    assert torch.equal(first, second)


def test_park_inside_a_torch_call_is_refused_without_it(model, monkeypatch):
    monkeypatch.setenv("NNSIGHT_PP_TLS_SWAP", "0")
    with pytest.raises(ParkRefusedError, match="NNSIGHT_PP_TLS_SWAP"):
        run(model)
    with model.trace(torch.ones(1, 3)):
        plain = model[0].output.save()
    assert plain.shape == (1, 3)
