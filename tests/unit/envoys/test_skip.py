# A block under test binds names, and stands inside another `with`.
import pytest
import torch
from torch import nn

from fakes.nets import WIDTH, Net, batch
from nnsight_pp import NNsight, OutOfOrderError, RowsError
from nnsight_pp.core.rows import Replacement, Rows
from nnsight_pp.engines.hf.beam_cut import BeamCut
from nnsight_pp.interleave.visit import Handed, OpenVisit

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


def test_a_skipped_module_gives_the_value(model):
    with model.trace(X):
        model.layers[1].skip(torch.ones(2, WIDTH))
        seen = model.layers[1].output.save()
        out = model.output.save()
    net = model._module
    assert torch.equal(seen, torch.ones(2, WIDTH))
    assert torch.equal(out, net.head(net.layers[2](torch.ones(2, WIDTH))))


def test_a_module_may_be_skipped_with_its_own_input(model):
    with model.trace(X):
        model.layers[1].skip(model.layers[1].input)
        out = model.output.save()
    net = model._module
    assert torch.equal(out, net.head(net.layers[2](net.layers[0](X))))


def test_a_skipped_module_is_not_run(model):
    class Fails(nn.Module):
        def forward(self, x, *, scale):
            raise AssertionError

    model._module.layers[1] = Fails()
    model = NNsight(model._module)
    with model.trace(X):
        model.layers[1].skip(X)
    with pytest.raises(AssertionError):
        with model.trace(X):
            model.output


def test_output_of_a_skipped_module_can_be_edited(model):
    with model.trace(X):
        model.layers[2].skip(torch.ones(2, WIDTH))
        model.layers[2].output[:] = 0
        out = model.output.save()
    assert torch.equal(out, model._module.head(torch.zeros(2, WIDTH)))


def test_the_root_may_be_skipped(model):
    with model.trace(X) as tracer:
        model.skip(torch.zeros(1))
        result = tracer.result.save()
    assert torch.equal(result, torch.zeros(1))


def test_what_stands_in_a_skipped_module_is_not_reached(model):
    with pytest.raises(OutOfOrderError):
        with model.trace(X):
            model.layers[1].skip(X)
            model.layers[1].fc.output


def test_skipping_what_has_run_is_refused(model):
    with pytest.raises(OutOfOrderError, match=r"layers\.1\.skip"):
        with model.trace(X):
            model.layers[1].output
            model.layers[1].skip(X)


def test_skip_asked_for_late_in_a_run_means_its_own_visit(model):
    """The first skip of a run comes after modules that were never offered one."""
    with model.trace(X, fn="rollout") as tracer:
        for step in tracer.iter[:3]:
            model.layers[0].input
            if step == 1:
                model.layers[0].skip(torch.ones(2, WIDTH))
            first = model.layers[0].output
            if step == 1:
                skipped = first.save()
            if step == 2:
                ran = first.save()
    assert torch.equal(skipped, torch.ones(2, WIDTH))
    assert not torch.equal(ran, skipped)


def test_every_invoke_skips_its_own_rows(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.layers[1].skip(torch.ones(2, WIDTH))
            first = model.output.save()
        with tracer.invoke(X[:1]):
            model.layers[1].skip(torch.zeros(1, WIDTH))
            second = model.output.save()
    net = model._module
    assert torch.allclose(first, net.head(net.layers[2](torch.ones(2, WIDTH))))
    assert torch.allclose(second, net.head(net.layers[2](torch.zeros(1, WIDTH))))


def test_a_skip_for_some_rows_is_refused(model):
    with pytest.raises(RowsError, match="cover every row"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                model.layers[1].skip(torch.ones(2, WIDTH))
            with tracer.invoke(X):
                model.output.save()


def test_rows_of_a_beam_search_are_skipped_together():
    offered = Replacement()
    handed = Handed(offered)
    for start, value in ((0, 1.0), (1, 2.0)):
        cut = BeamCut(Rows(start, 1, 2), {1, 3})
        visit = OpenVisit(handed, cut)
        visit.assign(torch.full((3, WIDTH), value))
        visit.commit()
    assert offered.whole("model.head")[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_an_invoke_without_input_skips_for_all(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            first = model.layers[1].output.save()
        with tracer.invoke(X):
            second = model.layers[1].output.save()
        with tracer.invoke():
            model.layers[1].skip(torch.ones(4, WIDTH))
    assert torch.equal(first, torch.ones(2, WIDTH))
    assert torch.equal(second, torch.ones(2, WIDTH))


def test_a_skipped_operation_is_not_run(model):
    layer = model.layers[1]
    with model.trace(X):
        layer.source.self_act_0.skip(torch.zeros(2, WIDTH))
        zero = layer.source.self_act_0.output.save()
        out = layer.output.save()
    assert torch.equal(zero, torch.zeros(2, WIDTH))


def test_an_assignment_is_skipped_by_another_value():
    class Adds(nn.Module):
        def forward(self, x):
            y = x + 1
            return y * 2

    model = NNsight(Adds())
    with model.trace(X):
        model.source.y_0.skip(torch.zeros(2, WIDTH))
        out = model.output.save()
    assert not out.any()


def test_the_next_trace_skips_nothing(model):
    expected = model._module(X)
    with model.trace(X):
        model.layers[1].skip(X)
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, expected)
