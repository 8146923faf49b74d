# A block under test binds names, and stands inside another `with`.
import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from fakes.nets import Net, batch
from nnsight_pp import NNsight
from nnsight_pp.core.location import Location
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.serve_point import (
    ServePoint,
    install_serve_points,
    module_paths,
)

X = batch(2)


def served_by(module, call):
    """Return the locations that ``call`` offers, in order."""
    gate, seen = Gate(), []
    install_serve_points(module_paths(module), gate)
    gate.serve = lambda location, value: seen.append(str(location)) or value
    call(module)
    gate.serve = None
    return seen


def test_module_offers_its_input_then_its_children_then_its_output():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert served_by(module, lambda m: m(X)) == [
        "model.input",
        "model.0.input",
        "model.0.output",
        "model.1.input",
        "model.1.output",
        "model.output",
    ]


def test_call_past_the_modules_call_is_served_too():
    assert served_by(nn.Tanh(), lambda m: m.forward(X)) == ["model.input", "model.output"]


def test_idle_point_changes_nothing_and_hides_no_signature():
    module = Net()
    signature = inspect.signature(module.forward)
    expected = module(X)
    install_serve_points(module_paths(module), Gate())
    assert torch.equal(module(X), expected)
    assert inspect.signature(module.forward) == signature


def test_wrapping_again_does_not_stack_points():
    module = Net()
    trees = [NNsight(module) for _ in range(5)]
    point = module.layers[0].forward
    assert isinstance(point, ServePoint)
    assert not isinstance(point.__wrapped__, ServePoint)
    assert len(point._views) == 5
    del trees
    assert len(point._views) == 0


def test_each_tree_of_a_module_is_served_by_its_own_run_only():
    module = Net()
    one, two = NNsight(module), NNsight(module)
    with one.trace(X):
        first = one.layers[0].output.save()
    with two.trace(X * 2):
        second = two.layers[0].output.save()
    assert torch.equal(first, module.layers[0](X))
    assert torch.equal(second, module.layers[0](X * 2))


def test_trace_of_a_second_tree_inside_a_block_leaves_the_first_untouched():
    module = Net()
    one, two = NNsight(module), NNsight(module)
    with one.trace() as tracer:
        with tracer.invoke(X):
            hidden = one.layers[0].output
            with two.trace(X * 5):
                inner = two.layers[1].output.save()
            after = one.layers[1].output.save()
        with tracer.invoke(X):
            beside = one.layers[1].output.save()
    plain = module.layers[1](module.layers[0](X))
    assert torch.allclose(after, plain)
    assert torch.allclose(beside, plain)
    assert torch.equal(inner, module.layers[1](module.layers[0](X * 5)))


# ------------------------------------------------------------------------------- shared modules


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
        rotary = nn.Tanh()
        self.a.rotary = self.b.rotary = rotary

    def forward(self, x):
        return self.b(self.a(x))


def test_shared_module_is_one_node_that_is_visited_from_each_place():
    model = NNsight(Shared())
    assert model.b.rotary is model.a.rotary
    with model.trace(X) as tracer:
        first, second = [model.a.rotary.output for _ in tracer.iter[:2]]
        seen = [first, second].save()
    assert torch.equal(seen[0], model._module.a(X))
    assert torch.equal(seen[1], model._module.b(seen[0]))


def test_shared_module_of_a_split_model_takes_its_path_from_its_caller():
    seen = served_by(Shared(), lambda m: m(X))
    assert [one for one in seen if one.endswith("rotary.output")] == [
        "model.a.rotary.output",
        "model.b.rotary.output",
    ]


def test_two_names_under_one_parent_are_the_first_of_them():
    module = nn.Sequential(nn.Linear(4, 4))
    module.again = module[0]
    assert served_by(module, lambda m: m[0](X)) == ["model.0.input", "model.0.output"]


def test_shared_module_called_by_nobody_in_the_tree_has_its_first_path():
    assert served_by(Shared(), lambda m: m.b.rotary(X)) == [
        "model.a.rotary.input",
        "model.a.rotary.output",
    ]


@pytest.mark.parametrize("wanted", ["model.a.rotary.output", "model.b.rotary.input"])
def test_shared_module_is_served_under_the_caller_that_somebody_waits_for(wanted: str):
    module, gate, seen = Shared(), Gate(), []
    install_serve_points(module_paths(module), gate)
    gate.serve = lambda location, value: seen.append(str(location)) or value
    path, _, kind = wanted.rpartition(".")
    gate.parked = {Location(path, kind): object()}
    module(X)
    assert wanted in seen
    assert {one.rpartition(".")[0] for one in seen} == {path}
    assert gate.running == []


@pytest.mark.parametrize("parked", [None, {}])
def test_error_in_a_module_leaves_no_path_running(parked):
    module = Shared()
    gate = Gate()
    install_serve_points(module_paths(module), gate)
    gate.serve, gate.parked = lambda location, value: value, parked
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 9))
    assert gate.running == []


# --------------------------------------------------------------------------------------- copies


def changed(module):
    with torch.no_grad():
        module.head.weight.zero_()
        module.head.bias.fill_(3)
    return module


def test_deep_copy_runs_on_its_own_weights():
    module = Net()
    model = NNsight(module)
    expected = module(X)
    other = changed(copy.deepcopy(module))
    assert torch.equal(other(X), torch.full((2, 2), 3.0))
    assert torch.equal(module(X), expected)
    with NNsight(other).trace(X) as tracer:
        out = tracer.result.save()
    assert torch.equal(out, torch.full((2, 2), 3.0))
    assert model.layers is not None


def test_pickled_module_runs_on_its_own_weights():
    module = Net()
    model = NNsight(module)
    data = pickle.dumps(module)
    assert b"nnsight_pp" not in data
    other = changed(pickle.loads(data))
    assert torch.equal(other(X), torch.full((2, 2), 3.0))
    assert not torch.equal(module(X), other(X))
    assert model.layers is not None


def test_saved_module_is_read_back():
    module = Net()
    model = NNsight(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), module(X))
    assert model.layers is not None


def test_forward_set_on_the_instance_is_kept():
    module = Net()
    plain = module.forward
    module.forward = lambda x: plain(x) + 1
    expected = module(X)
    with NNsight(module).trace(X) as tracer:
        out = tracer.result.save()
    assert torch.equal(out, expected)


def test_locations_name_their_module():
    assert Location("model.layers.0", "output") == Location.parse("model.layers.0.output")
