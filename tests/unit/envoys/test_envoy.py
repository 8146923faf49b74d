# A block under test binds names, and stands inside another `with`.
import gc
import weakref

import pytest
import torch
from torch import nn

from fakes.nets import Layer, Net, batch
from nnsight_pp import Envoy, NNsight, UnknownLocationError
from nnsight_pp.core.rows import BatchCut
from nnsight_pp.interleave import nearby
from nnsight_pp.interleave.asks import Asks

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


# -------------------------------------------------------------------------------------- the tree


def test_paths_parents_and_root(model):
    fc = model.layers[1].fc
    assert fc.path == "model.layers.1.fc"
    assert fc.parent is model.layers[1]
    assert fc.root is model
    assert model.parent is None


def test_indices_slices_and_names(model):
    layers = model.layers
    assert layers[-1] is layers[2] is layers["2"]
    assert [node.path for node in layers[1:]] == ["model.layers.1", "model.layers.2"]
    assert [node.path for node in layers[::-2]] == ["model.layers.2", "model.layers.0"]
    assert list(layers) == [layers[0], layers[1], layers[2]]
    assert len(layers) == 3


@pytest.mark.parametrize("index", [3, -4, 1.0, True, "fc"])
def test_index_that_is_not_there_is_an_attribute_error(model, index):
    with pytest.raises(AttributeError, match="has no"):
        model.layers[index]


def test_length_and_truth_are_those_of_the_module(model):
    assert bool(model)
    assert not Envoy(nn.ModuleList())
    with pytest.raises(TypeError):
        len(model.head)


def test_dotted_lookup(model):
    assert model.get("layers.1.fc") is model.layers[1].fc
    with pytest.raises(UnknownLocationError, match=r"Near matches: .*fc"):
        model.get("layers.1.fcc")


@pytest.mark.parametrize("wrong", ["layer", "heads", "outputs"])
def test_wrong_name_lists_near_matches(model, wrong):
    with pytest.raises(UnknownLocationError, match=r"Near matches: (layers|head|output)") as caught:
        getattr(model, wrong)
    assert f"has no {wrong!r}" in str(caught.value)
    assert isinstance(caught.value, AttributeError)


def test_wrong_name_in_a_block_is_an_error_at_its_line(model):
    with pytest.raises(UnknownLocationError, match="Near matches: layers"):
        with model.trace(X):
            model.layer[0].output


def test_modules_come_children_first_and_the_root_last(model):
    paths = [path for path, _ in model.named_modules()]
    assert paths[:3] == ["model.layers.0.fc", "model.layers.0.act", "model.layers.0"]
    assert paths[-1] == "model"
    assert model.modules(lambda node: node.path.endswith("fc"))[0] is model.layers[0].fc


def test_parameters_settings_and_methods_are_the_modules(model):
    assert model.layers[0].fc.weight is model._module.layers[0].fc.weight
    assert model.training is True
    assert model.eval() is not None
    assert model.head.out_features == 2
    assert "layers" in dir(model)
    assert model.cpu() is model
    assert model.to(torch.float32) is model


def test_property_that_gives_a_module_gives_its_node():
    class Wrapping(Net):
        @property
        def base(self):
            return self.layers

    model = NNsight(Wrapping())
    assert model.base is model.layers


def test_property_that_fails_says_why():
    class Failing(Net):
        @property
        def broken(self):
            raise AttributeError("the reason")

    with pytest.raises(AttributeError, match="the reason"):
        NNsight(Failing()).broken


def test_print_folds_alike_layers(model):
    assert repr(model).splitlines() == [
        "Net(",
        "  (layers): ModuleList(",
        "    (0-2): 3 x Layer(",
        "      (fc): Linear(in_features=4, out_features=4, bias=True)",
        "      (act): Tanh()",
        "    )",
        "  )",
        "  (head): Linear(in_features=4, out_features=2, bias=True)",
        ")",
    ]


def test_print_shows_a_differing_layer_apart():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 3)])
    heads = [line.split(":")[0].strip() for line in repr(Envoy(module)).splitlines()[1:-1]]
    assert heads == ["(0-1)", "(2)", "(3)"]


def test_module_named_like_a_value_is_reached_under_another_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.output = nn.Linear(4, 4)

        def forward(self, x):
            return self.output(x) * 2

    with pytest.warns(UserWarning, match="already serves"):
        model = NNsight(Odd())
    with model.trace(X):
        inner = model.E_output.output.save()
        outer = model.output.save()
    assert model.E_output.path == "model.output"
    assert model.get("output") is model.E_output
    assert torch.equal(outer, inner * 2)


def test_module_set_on_a_node_is_registered_mirrored_and_served(model):
    model.layers[0].act = nn.ReLU()
    model.extra = Layer()
    assert isinstance(model._module.layers[0].act, nn.ReLU)
    assert model.extra.path == "model.extra"
    assert "(extra): Layer(" in repr(model)
    with model.trace(X):
        hidden = model.layers[0].act.output.save()
    assert (hidden >= 0).all()


def test_other_values_stay_on_the_node(model):
    model.note = "mine"
    assert model.note == "mine"
    assert not hasattr(model._module, "note")


def test_print_is_torchs_own_for_a_plain_model(model):
    assert repr(model) == repr(model._module)


def test_any_node_is_a_tree_that_runs():
    tree = Envoy(Net())
    with tree.trace(X):
        hidden = tree.layers[0].output.save()
    assert torch.equal(hidden, tree._module.layers[0](X))
    assert tree(X).shape == (2, 2)


# ---------------------------------------------------------------------------------------- values


def test_output_is_the_live_object_and_the_same_each_time(model):
    with model.trace(X):
        first = model.layers[0].output.save()
        is_same = (model.layers[0].output is first).save()
    assert is_same
    assert first.requires_grad


def test_inputs_and_input(model):
    with model.trace(X, scale=2.0):
        inputs = model.layers[0].inputs.save()
        first = model.layers[0].input.save()
    assert inputs == ((X,), {"scale": 2.0})
    assert first is X


def test_input_of_a_call_by_keyword_stays_a_keyword():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def forward(self, x):
            return self.inner(x=x)

    model = NNsight(Keyword())
    with model.trace(X):
        model.inner.input = X * 0
        inputs = model.inner.inputs.save()
        out = model.output.save()
    assert inputs[0] == ()
    assert torch.equal(inputs[1]["x"], X * 0)
    assert torch.equal(out, model._module.inner(X * 0))


def test_assigned_inputs_change_the_call(model):
    with model.trace(X):
        model.layers[0].inputs = ((X * 2,), {"scale": 3.0})
        hidden = model.layers[0].output.save()
    assert torch.equal(hidden, model._module.layers[0](X * 2, scale=3.0))


def test_edit_in_place_assignment_and_augmented_assignment(model):
    with model.trace(X):
        model.layers[0].output[:, 0] = 0
        model.layers[1].output = model.layers[1].output * 0
        model.layers[2].output += 5
        seen = [layer.output for layer in ()].save()
        hidden = model.head.input.save()
    expected = model._module.layers[2](torch.zeros(2, 4)) + 5
    assert torch.equal(hidden, expected)


def test_later_read_of_an_assigned_value_gives_what_was_assigned(model):
    with model.trace(X):
        model.layers[0].output = X * 7
        seen = model.layers[0].output.save()
        following = model.layers[1].input.save()
    assert torch.equal(seen, X * 7)
    assert torch.equal(following, X * 7)


def test_rebinding_a_name_changes_nothing(model):
    with model.trace(X) as tracer:
        hidden = model.layers[0].output
        hidden = hidden * 0
        out = tracer.result.save()
    assert torch.equal(out, model._module(X))


def test_attribute_error_of_a_read_is_not_taken_for_a_missing_name(model, monkeypatch):
    def refuse(asks, worker, location):
        raise UnknownLocationError("nobody computes this")

    monkeypatch.setattr(Asks, "read", refuse)
    monkeypatch.setattr(nearby, "state", lambda counts, parked: None)
    with pytest.raises(UnknownLocationError, match="nobody computes this"):
        with model.trace(X):
            model.layers[0].output


def test_attribute_error_at_the_end_of_a_visit_is_not_taken_for_a_missing_name(model, monkeypatch):
    def refuse(*given, assigned):
        raise UnknownLocationError("it does not fit")

    monkeypatch.setattr(BatchCut, "put", refuse)
    with pytest.raises(UnknownLocationError, match="it does not fit"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                model.layers[0].output = model.layers[0].output * 2
                model.layers[1].output
            with tracer.invoke(X):
                model.layers[1].output


def test_value_of_another_model_is_refused(model):
    other = NNsight(Net(9))
    with pytest.raises(UnknownLocationError, match="of another model"):
        with model.trace(X):
            other.layers[0].output


# ------------------------------------------------------------------------------------- lifetimes


def test_dropped_tree_leaves_the_module_collectable():
    module = Net()
    model = NNsight(module)
    with model.trace(X):
        hidden = model.layers[0].output.save()
    refs = [weakref.ref(module), weakref.ref(model), weakref.ref(model.layers[0])]
    del module, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_dropped_tree_is_freed_without_the_collector():
    module = Net()
    gc.collect()
    gc.disable()
    try:
        ref = weakref.ref(NNsight(module))
        assert ref() is None
    finally:
        gc.enable()


def test_a_weight_that_is_set_is_set_on_the_module():
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    weight, mean = torch.nn.Parameter(torch.ones(2, 2)), torch.full((2,), 3.0)
    model[0].weight = weight
    model[1].running_mean = mean
    assert model[0].weight is model._module[0].weight is weight
    assert model._module[1].running_mean is mean
    with torch.no_grad():
        model[0].weight *= 2
    assert model[0].weight is weight
    assert weight.sum() == 8
    with pytest.raises(TypeError):
        model[0].weight = torch.ones(2, 2)
