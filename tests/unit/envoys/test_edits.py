# A block under test binds names, and stands inside another `with`.
import pytest
import torch
from torch import nn

from fakes.nets import Net, batch
from nnsight_pp import Envoy, NNsight, OutOfOrderError, save

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


def zeroed_head(model):
    return model._module.head(torch.zeros(2, 4))


def test_an_edited_copy_runs_its_block_first_and_the_original_does_not(model):
    with model.edit() as (_, edited):
        edited.layers[2].output[:] = 0
    with edited.trace(X):
        out = edited.output.save()
    assert torch.equal(out, zeroed_head(model))
    assert torch.equal(model.trace(X, trace=False), model._module(X))
    assert torch.equal(edited.trace(X, trace=False), out)


def test_an_edit_in_place_stays_until_it_is_cleared(model):
    with model.edit(inplace=True):
        model.layers[2].output[:] = 0
    for _ in range(2):
        assert torch.equal(model.trace(X, trace=False), zeroed_head(model))
    model.clear_edits()
    assert torch.equal(model.trace(X, trace=False), model._module(X))


def test_a_block_of_the_run_sees_what_the_edit_made(model):
    with model.edit(inplace=True):
        model.layers[0].output = X * 7
    with model.trace(X):
        seen = model.layers[0].output.save()
    assert torch.equal(seen, X * 7)


def test_an_edit_sees_all_rows_of_the_invokes(model):
    rows = []
    with model.edit(inplace=True):
        rows.append(len(model.layers[0].output))
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.output
        with tracer.invoke(X):
            model.output
    assert rows == [4]


def test_an_edit_sees_the_names_of_when_it_was_made_and_keeps_none(model):
    factor = 0.0
    with model.edit(inplace=True):
        factor = factor + 1
        model.layers[2].output *= factor
        kept = save(factor)
    factor = 5.0
    for _ in range(2):
        assert torch.equal(model.trace(X, trace=False), model._module(X))
    with pytest.raises(UnboundLocalError):
        kept


def test_edits_belong_to_the_node_at_which_the_run_starts(model):
    with model.layers[0].edit(inplace=True):
        model.layers[0].fc.output[:] = 0
    hidden = X + 0
    with model.layers[0].trace(X):
        out = model.layers[0].output.save()
    assert torch.equal(out, hidden)
    assert torch.equal(model.trace(X, trace=False), model._module(X))


def test_an_edit_in_a_loop_is_made_at_every_step(model):
    with model.edit(inplace=True) as tracer:
        for _ in tracer.iter[:3]:
            model.layers[2].output = torch.zeros(2, 4)
    with model.trace(X, fn=model._module.rollout) as tracer:
        out = tracer.result.save()
    assert not out.any()


def test_an_edit_that_is_never_served_fails_the_run(model):
    with model.edit(inplace=True):
        model.output
        model.layers[0].output
    with pytest.raises(OutOfOrderError, match=r"layers\.0"):
        with model.trace(X):
            pass


# ------------------------------------------------------------------------------ calls with hooks


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


def test_what_an_edit_calls_with_hooks_is_served_to_the_block(model):
    model.layers[0].adapter = Adapter()
    adapter = model.layers[0].adapter
    with model.edit(inplace=True):
        model.layers[0].output[:] = adapter(model.layers[0].output, hook=True)
    with model.trace(X):
        inner = adapter.inner.output.clone().save()
        out = model.layers[0].output.clone().save()
    assert torch.equal(inner, out)
    assert torch.equal(inner, adapter._module(model._module.layers[0](X)))


def test_a_block_cannot_read_inside_its_own_call(model):
    with pytest.raises(OutOfOrderError):
        with model.trace(X):
            model.layers[1].fc(model.layers[0].output, hook=True)
            model.layers[1].fc.output  # spent by the call
            model.layers[0].output


def test_a_call_without_hooks_is_served_to_nobody(model):
    model.extra = Adapter()
    with model.edit(inplace=True):
        model.extra(model.layers[0].output)
    with pytest.raises(OutOfOrderError, match="extra"):
        with model.trace(X):
            model.extra.inner.output


def test_a_node_may_be_attached_by_hand(model):
    other = Adapter()
    node = Envoy(other, path="model.spare", parent=model, interleaver=model.interleaver)
    with model.edit(inplace=True):
        node(model.layers[0].output, hook=True)
    with model.trace(X):
        inner = node.inner.output.save()
    assert torch.equal(inner, other(model._module.layers[0](X)))
