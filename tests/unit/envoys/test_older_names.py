"""Names that a node still answers for the tracer."""

import pytest

from fakes.nets import Net, batch
from nnsight_pp import NNsight, NNsightDeprecationWarning, save


@pytest.fixture
def model():
    return NNsight(Net())


def test_steps_of_the_model_are_those_of_the_tracer(model):
    with model.trace(batch(2)):
        seen = save([])
        with pytest.warns(NNsightDeprecationWarning, match=r"model\.iter .* use tracer\.iter"):
            steps = model.iter[:1]
        for step in steps:
            seen.append((step, tuple(model.output.shape)))
    assert [step for step, _ in seen] == [0]


def test_all_steps_of_the_model_warn_once(model):
    with pytest.warns(NNsightDeprecationWarning, match=r"use tracer\.all\(\)") as noted:
        model.all()
    assert len(noted) == 1
