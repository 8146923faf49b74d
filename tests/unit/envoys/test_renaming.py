import pytest
from torch import nn

from fakes.nets import Layer, Net, batch
from nnsight_pp import Envoy, NNsight

X = batch(2)


class Special(Envoy):
    pass


# ---------------------------------------------------------------------------------- further names


def test_one_name_is_bound_wherever_it_is_found():
    model = NNsight(Net(), rename={"fc": "linear"})
    assert all(layer.linear is layer.fc for layer in model.layers)
    assert model.get("layers.1.linear") is model.layers[1].fc


def test_a_path_is_bound_where_it_starts():
    model = NNsight(Net(), rename={"layers.1.fc": "middle", ".head": ["out", "logits"]})
    assert model.middle is model.layers[1].fc
    assert model.out is model.logits is model.head
    assert not hasattr(model.layers[1], "middle")


def test_a_star_stands_for_any_one_name():
    model = NNsight(nn.ModuleDict({"body": Net()}), rename={"*.layers": "blocks"})
    assert model.blocks is model.body.layers


def test_a_class_names_the_one_child_of_it():
    model = NNsight(Net(), rename={nn.Linear: "only"})
    assert model.only is model.head
    assert model.layers[0].only is model.layers[0].fc


def test_a_dotted_name_is_bound_on_a_module_on_the_way():
    model = NNsight(Net(), rename={"layers": "blocks", "layers.0.fc": "blocks.first"})
    assert model.layers.first is model.layers[0].fc


def test_a_key_that_leads_nowhere_is_skipped():
    assert not hasattr(NNsight(Net(), rename={"h.0": "first"}), "first")


def test_a_renamed_module_serves_its_values_under_its_own_path():
    model = NNsight(Net(), rename={"layers": "blocks"})
    with model.trace(X):
        seen = model.blocks[0].output.save()
        same = (model.layers[0].output is seen).save()
    assert same
    assert model.blocks[0].path == "model.layers.0"


def test_further_names_are_shown():
    model = NNsight(Net(), rename={"head": "out", "layers.0.fc": "first"})
    lines = repr(model).splitlines()
    assert "  (out/head): Linear(in_features=4, out_features=2, bias=True)" in lines
    assert "  (first): Linear(in_features=4, out_features=4, bias=True)" in lines


def test_a_further_name_may_be_its_own():
    model = NNsight(Net(), rename={"layers": "layers", "blocks": "layers"})
    assert model.layers.path == "model.layers"


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"head": "layers"}, "would shadow the child module"),
        ({"head": "trace"}, r"would shadow NNsight\.trace"),
        ({"head": "training"}, "would shadow"),
        ({"head": "output"}, "would shadow"),
        ({"head": "x", "layers": "x"}, "already bound here"),
        ({"layers.*": "x"}, r"'layers.\*' matches 3 modules under `model`"),
        ({Layer: "x"}, r"'Layer' matches 3 modules under `model.layers` \(0, 1, 2\)"),
        ({"layers.0": "head.x"}, "names no ancestor"),
    ],
)
def test_a_name_that_cannot_be_is_refused(rename, message):
    with pytest.raises(ValueError, match=message):
        NNsight(Net(), rename=rename)


# ---------------------------------------------------------------------------------------- classes


def kinds(model):
    return sorted(node.path for node in model.modules() if type(node) is Special)


@pytest.mark.parametrize(
    ("envoys", "rename", "paths"),
    [
        ({nn.ModuleList: Special}, {}, ["model.layers"]),
        ({"layers.1.fc": Special}, {}, ["model.layers.1.fc"]),
        ({"layers.*": Special}, {}, [f"model.layers.{n}" for n in range(3)]),
        ({"blocks.*": Special}, {"layers": "blocks"}, [f"model.layers.{n}" for n in range(3)]),
        ({"blocks.0.lin": Special}, {"layers": "blocks", "fc": "lin"}, ["model.layers.0.fc"]),
        ({"out": Special}, {"*": "out"}, []),
    ],
)
def test_classes_are_chosen_by_class_path_and_further_name(envoys, rename, paths):
    if "*" in rename:
        with pytest.raises(ValueError, match="matches"):
            NNsight(Net(), rename=rename, envoys=envoys)
        return
    assert kinds(NNsight(Net(), rename=rename, envoys=envoys)) == paths


def test_one_class_is_that_of_all_below():
    model = NNsight(Net(), envoys=Special)
    assert len(kinds(model)) == len(model.modules()) - 1


def test_the_class_of_the_module_wins_over_its_path():
    class Other(Envoy):
        pass

    model = NNsight(Net(), envoys={"head": Other, nn.Linear: Special})
    assert type(model.head) is Special


# --------------------------------------------------------------------------------------- the tree


def test_a_module_that_is_no_child_gets_a_node_when_it_is_reached():
    module = Net()
    object.__setattr__(module, "spare", nn.Linear(4, 4))
    model = NNsight(module)
    assert model.spare.path == "model.spare"
    assert model.spare is model.spare


def test_device_is_that_of_the_weights():
    model = NNsight(Net())
    assert str(model.device) == "cpu"
    assert model.devices == {model.device}
    assert Envoy(nn.Tanh()).device is None


def test_a_list_rebuilt_of_its_own_modules_is_mirrored_anew():
    model = NNsight(Net())
    model.layers = nn.ModuleList(list(model._module.layers)[:2])
    assert [node.path for node in model.layers] == ["model.layers.0", "model.layers.1"]
    with model.trace(X):
        last = model.layers[1].output.save()
        into = model.head.input.save()
    assert into is last
