# A block under test binds names, and stands inside another `with`.
import pytest
import torch

from fakes.nets import WIDTH, Layer, Net, batch
from nnsight_pp import Envoy, NNsight, eproperty, save, traceable

X = batch(2)


class Halves(Envoy):
    @eproperty(key="output", description="two halves of the output")
    def halves(self, value) -> torch.Tensor:
        return value.unflatten(-1, (2, -1)).clone()

    @halves.transform
    def halves(self, edited, raw):
        return edited.flatten(-2)

    @eproperty(key="output")
    def scaled(self, value):
        return value * 10

    @scaled.postprocess
    def scaled(self, value):
        return value / 10

    @eproperty()
    def extra(self, value):
        return value

    @traceable
    def run(self, value):
        return self._module(value) if value is not None else "nothing"


@pytest.fixture
def model():
    return NNsight(Net(), envoys={Layer: Halves})


def test_a_view_is_read_and_its_edit_goes_back(model):
    with model.trace(X):
        model.layers[0].halves[:, 0] = 0
        out = model.layers[0].output.save()
        into = model.layers[1].input.save()
    assert not out[:, : WIDTH // 2].any()
    assert out[:, WIDTH // 2 :].any()
    assert torch.equal(into, out)


def test_an_edit_by_the_last_statement_goes_back(model):
    seen = []
    model._module.head.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with model.trace(X):
        model.layers[2].halves[:] = 0
    assert not seen[0].any()


def test_a_view_read_again_is_the_same_one(model):
    with model.trace(X):
        first = model.layers[0].halves
        model.layers[0].halves += 1
        same = (model.layers[0].halves is first).save()
        out = model.layers[0].output.save()
    assert same
    assert torch.allclose(out, model._module.layers[0](X) + 1)


def test_a_view_that_was_only_read_leaves_the_value_alone(model):
    with model.trace(X):
        model.layers[0].halves.sum()
        into = model.layers[1].input
        same = (model.layers[0].path == "model.layers.0" and into.grad_fn is not None).save()
        name = save(type(into.grad_fn).__name__)
    assert same
    assert name == "AddBackward0"


def test_what_is_assigned_is_turned_back(model):
    with model.trace(X):
        model.layers[0].scaled = torch.full((2, WIDTH), 5.0)
        out = model.layers[0].output.save()
    assert (out == 0.5).all()


def test_rows_of_invokes_are_edited_through_their_views(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.layers[0].halves[:] = 0
        with tracer.invoke(X):
            other = model.layers[0].halves.save()
        with tracer.invoke():
            both = model.layers[0].output.save()
    assert not both[:2].any()
    assert torch.equal(both[2:], other.flatten(-2))


def test_a_value_of_its_own_is_provided_by_the_users_code(model):
    module = model._module

    def call(value):
        type(model.layers[0]).extra.provide(model.layers[0], "given")
        return module(value)

    with model.trace(X, fn=call):
        seen = model.layers[0].extra.save()
    assert seen == "given"
    assert Halves.extra.provide(model.layers[0], 3) == 3


def test_a_view_is_listed_with_its_description(model):
    assert "(halves) -> Tensor: two halves of the output" in repr(model)


def test_a_view_outside_of_a_run_is_refused(model):
    with pytest.raises(ValueError, match="outside of interleaving"):
        model.layers[0].halves


def test_a_traceable_method_is_called_or_entered(model):
    layer = model.layers[0]
    assert layer.run(None) == "nothing"
    with layer.run(X) as tracer:
        inner = layer.fc.output.save()
        out = tracer.result.save()
    assert torch.equal(inner, layer._module.fc(X))
    assert torch.equal(out, layer._module(X))
    with model.trace(X):
        plain = save(layer.run(X))
    assert torch.equal(plain, out)


def past_the_version(view):
    view.data[:, 0] = 0


def in_numpy(view):
    view.numpy()[:, 0] = 0


def counted(view):
    view[:, 0] = 0


def looked_at(view):
    float(view.sum())


@pytest.mark.parametrize("edit", [past_the_version, in_numpy, counted, looked_at])
@pytest.mark.parametrize("is_last", [False, True])
def test_what_a_function_writes_past_the_version_goes_back(model, edit, is_last):
    seen = []
    model._module.head.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with torch.no_grad():
        with model.trace(X):
            edit(model.layers[2].halves)
            if not is_last:
                model.layers[2].output.sum()
    assert seen[0][:, : WIDTH // 2].any() == (edit is looked_at)
    assert seen[0][:, WIDTH // 2 :].any()
