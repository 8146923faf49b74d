# A block under test binds names, and stands inside another `with`.
import contextlib
import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from fakes.nets import WIDTH, Net, batch
from nnsight_pp import NNsight, NotSupportedError, OutOfOrderError, RowsError

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


def gradients_by_hooks(net, x, score=torch.sum):
    """Return the outputs of the layers and their gradients, with plain torch."""
    kept = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: (out.retain_grad(), kept.append(out))[0])
        for layer in net.layers
    ]
    score(net(x)).backward()
    for hook in hooks:
        hook.remove()
    net.zero_grad()
    return [out.detach() for out in kept], [out.grad for out in kept]


def test_gradient_is_that_of_plain_torch(model):
    with model.trace(X):
        hidden = model.layers[1].output
        loss = model.output.sum()
        with loss.backward():
            gradient = hidden.grad.save()
    model._module.zero_grad()
    assert torch.equal(gradient, gradients_by_hooks(model._module, X)[1][1])


def test_a_bare_backward_is_torchs_own():
    NNsight(Net())
    leaf = torch.tensor([2.0], requires_grad=True)
    assert (leaf * 3).sum().backward() is None
    assert torch.equal(leaf.grad, torch.tensor([3.0]))


def test_a_bare_backward_keeps_its_arguments():
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 3).backward(torch.tensor([1.0, 2.0]))
    assert torch.equal(leaf.grad, torch.tensor([3.0, 6.0]))


@pytest.mark.slow
def test_wrapping_a_model_is_what_teaches_backward():
    code = (
        "import torch, nnsight_pp\n"
        "before = torch.Tensor.backward\n"
        "assert before.__code__.co_filename.endswith('_tensor.py'), before\n"
        "nnsight_pp.NNsight(torch.nn.Linear(1, 1))\n"
        "assert torch.Tensor.backward is not before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_layer_in_the_order_of_the_backward_pass(model):
    found = {}
    with model.trace(X):
        hidden = [layer.output for layer in model.layers]
        loss = model.output.sum()
        with loss.backward():
            for number in (2, 1, 0):
                found[number] = hidden[number].grad
    model._module.zero_grad()
    wanted = gradients_by_hooks(model._module, X)[1]
    assert all(torch.equal(found[number], wanted[number]) for number in range(3))


def test_an_assigned_gradient_flows_on(model):
    with model.trace(X):
        hidden = model.layers[1].output
        loss = model.output.sum()
        with loss.backward():
            hidden.grad = hidden.grad * 2
            seen = hidden.grad.save()
    module = model._module
    doubled = module.layers[0].fc.weight.grad.clone()
    module.zero_grad()
    module(X).sum().backward()
    assert torch.allclose(doubled, 2 * module.layers[0].fc.weight.grad)
    module.zero_grad()
    assert torch.equal(seen, 2 * gradients_by_hooks(module, X)[1][1])


def test_an_edit_in_place_flows_on(model):
    with model.trace(X):
        hidden = model.layers[1].output
        with model.output.sum().backward():
            hidden.grad[:] = 0
    module = model._module
    assert not module.layers[0].fc.weight.grad.any()
    assert module.layers[2].fc.weight.grad.any()


def test_an_edit_does_not_reach_a_tensor_that_shares_the_buffer(model):
    """An addition hands one gradient buffer to both of its terms."""
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    left, right = a * 1, b * 1
    loss = (left + right).sum()
    with loss.backward():
        left.grad[:] = 5
    assert torch.equal(a.grad, torch.full((3,), 5.0))
    assert torch.equal(b.grad, torch.ones(3))


def test_a_saved_gradient_is_not_changed_by_what_autograd_does_next(model):
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    with (y * 2 + y * 3).sum().backward():
        gradient = y.grad.save()
    x.grad.zero_()
    assert torch.equal(gradient, torch.full((3,), 5.0))


def test_gradients_of_one_nodes_outputs_in_any_order():
    x = torch.ones(6, requires_grad=True)
    q, k, v = (x * 1).split(2)
    with (q * 1 + k * 2 + v * 3).sum().backward():
        kept = [v.grad, q.grad, k.grad]
        k.grad = k.grad * 10
        kept.save()
    assert [one.tolist() for one in kept] == [[3, 3], [1, 1], [2, 2]]
    assert x.grad.tolist() == [1, 1, 20, 20, 3, 3]


def test_gradient_of_a_parameter_is_what_flows_into_it(model):
    weight = model.head.weight
    with model.trace(X):
        with model.output.sum().backward():
            flowing = weight.grad.save()
            weight.grad = torch.ones_like(weight)
    assert flowing.shape == weight.shape
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_gradient_of_one_asked_input_only(model):
    with model.trace(X):
        hidden = model.layers[0].output
        with model.output.sum().backward(inputs=[hidden]):
            gradient = hidden.grad.save()
    assert torch.equal(gradient, gradients_by_hooks(model._module, X)[1][0])
    assert model.head.weight.grad is None


def test_wrong_order_is_refused_at_the_line(model):
    with pytest.raises(OutOfOrderError, match="already ran past") as caught:
        with model.trace(X):
            early, late = model.layers[0].output, model.layers[1].output
            with model.output.sum().backward():
                early.grad
                late.grad
    assert "late.grad" in str(caught.value)


def test_tensor_that_is_not_in_the_graph_is_refused(model):
    with pytest.raises(OutOfOrderError, match=r"\.grad#0"):
        with model.trace(X):
            hidden = model.layers[0].output
            with model.output.sum().backward():
                hidden[0].grad


def test_values_of_the_model_are_refused_beside_a_backward_pass(model):
    with pytest.raises(OutOfOrderError, match="the forward is over"):
        with model.trace(X):
            with model.head.output.sum().backward():
                model.output


def test_the_result_is_refused_beside_a_backward_pass(model):
    with pytest.raises(OutOfOrderError, match="result"):
        with model.trace(X) as tracer:
            with model.head.output.sum().backward():
                tracer.result


def test_loss_without_grad_is_refused(model):
    with pytest.raises(NotSupportedError, match="does not require grad"):
        with model.trace(X):
            with torch.no_grad():
                loss = torch.ones(1) * 2
            with loss.backward():
                pass


def test_tensor_without_grad_is_torchs_error(model):
    with pytest.raises(RuntimeError, match="require"):
        with model.trace(X):
            given = model.input
            with model.output.sum().backward():
                given.grad


def test_gradient_of_another_shape_is_refused(model):
    with pytest.raises(RowsError, match="shape"):
        with model.trace(X):
            hidden = model.layers[0].output
            with model.output.sum().backward():
                hidden.grad = torch.ones(1)


def test_error_in_the_block_ends_the_pass_and_leaves_nothing(model):
    with pytest.raises(ZeroDivisionError):
        with model.trace(X):
            hidden = model.layers[1].output
            with model.output.sum().backward():
                hidden.grad / (1 / 0)
    assert model.layers[0].fc.weight.grad is None
    assert "grad" not in vars(torch.Tensor)


def test_error_of_torch_keeps_its_class(model):
    with pytest.raises(RuntimeError, match="second time"):
        with model.trace(X):
            hidden = model.layers[1].output
            loss = model.output.sum()
            with loss.backward():
                hidden.grad
            with loss.backward():
                hidden.grad


@pytest.mark.parametrize("is_right", [True, False])
def test_model_and_values_go_when_their_user_drops_them(is_right):
    def run():
        model = NNsight(Net())
        with contextlib.suppress(ZeroDivisionError):
            with model.trace(X):
                hidden = model.layers[1].output
                with model.output.sum().backward():
                    gradient = hidden.grad.save()
                    gradient / (1 if is_right else 1 / 0)
        return weakref.ref(model._module), weakref.ref(model.layers[0].fc.weight)

    gc.disable()
    try:
        assert [one() for one in run()] == [None, None]
    finally:
        gc.enable()


def test_two_passes_over_one_graph_do_not_add_up(model):
    with model.trace(X):
        hidden = model.layers[1].output
        out = model.output
        with out.sum().backward(retain_graph=True):
            once = hidden.grad.save()
        with (out.sum() * 3).backward():
            thrice = hidden.grad.save()
    assert torch.allclose(3 * once, thrice)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_of_gradients(model):
    with model.trace(X):
        hidden = model.layers[1].output
        loss = model.output.pow(3).sum()
        with loss.backward(create_graph=True):
            first = hidden.grad
        (second,) = torch.autograd.grad(first.sum(), hidden)
        second.save()
    assert second.any()


def test_names_flow_into_the_block_around(model):
    with model.trace(X):
        hidden = model.layers[1].output
        with model.output.sum().backward():
            inner = hidden.grad * 2
        kept = (inner + 1).save()
    assert kept.shape == (2, WIDTH)
    with pytest.raises(NameError):
        inner


def test_outside_of_a_trace_only_what_is_saved_comes_back():
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    with y.sum().backward():
        kept, dropped = y.grad.save(), y.grad
        kept.save()
        other = y.grad + 1
    assert torch.equal(kept, torch.ones(2))
    with pytest.raises(NameError):
        other
    assert torch.equal(x.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_each_invoke_gets_the_gradient_of_its_own_rows(model, scale):
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.layers[0].output.save()
        with tracer.invoke(X * scale):
            hidden = model.layers[1].output
            with model.output.sum().backward():
                gradient = hidden.grad.save()
                hidden.grad = hidden.grad * 10
                again = hidden.grad.save()
    batched = model.layers[0].fc.weight.grad.clone()
    model._module.zero_grad()
    assert torch.allclose(gradient, gradients_by_hooks(model._module, X * scale)[1][1])
    assert torch.equal(again, gradient * 10)
    model._module(X * scale).sum().backward()
    assert torch.allclose(batched, model.layers[0].fc.weight.grad * 10, rtol=1e-4)


def test_rows_of_a_view_get_the_gradient_of_the_view_alone():
    """The module's output is a view of a tensor that the model goes on with, too."""

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.shown = nn.Identity()

        def forward(self, x):
            whole = x * 2
            return self.shown(whole.view(x.shape[0], 2, -1)).sum() + (whole * 100).sum()

    model = NNsight(Halved())
    x = torch.ones(1, 4, requires_grad=True)
    with model.trace() as tracer:
        with tracer.invoke(x):
            hidden = model.shown.output
            with model.output.backward():
                gradient = hidden.grad.save()
        with tracer.invoke(x * 2):
            pass
    assert torch.equal(gradient, torch.ones(1, 2, 2))


def test_rows_that_were_edited_in_place(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            pass
        with tracer.invoke(X):
            hidden = model.layers[1].output
            hidden[:] = hidden * 2
            with model.output.sum().backward():
                gradient = hidden.grad.save()

    def doubled(_, __, out):
        out = (out * 2).detach().requires_grad_()
        kept.append(out)
        return out

    kept = []
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(model._module.layers[1].register_forward_hook(doubled).remove)
        model._module(X).sum().backward()
    assert torch.allclose(gradient, kept[0].grad)


def test_a_block_beside_a_block(model):
    """The inner pass runs while the outer one waits in one of its hooks."""
    with model.trace(X):
        hidden = model.layers[1].output
        other = torch.ones(2, requires_grad=True)
        twice = other * 2
        with model.output.sum().backward():
            with twice.sum().backward():
                inner = twice.grad.save()
            outer = hidden.grad.save()
    assert torch.equal(inner, torch.ones(2))
    assert outer.shape == (2, WIDTH)


def test_other_threads_see_their_own_gradients(model):
    """`Tensor.grad` is asked only by the block; what runs beside it reads what torch has."""
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 2).sum().backward()
    seen = []
    with model.trace(X):
        hidden = model.layers[1].output
        with model.output.sum().backward():
            thread = threading.Thread(target=lambda: seen.append(leaf.grad))
            thread.start()
            thread.join()
            hidden.grad
    assert torch.equal(seen[0], torch.full((2,), 2.0))


def test_attribution_patching_is_that_of_hooks(model):
    clean, corrupt = batch(1), batch(1) * -2
    with model.trace(clean):
        base = [layer.output.detach() for layer in model.layers]
        base.save()
    effects = {}
    with model.trace(corrupt):
        hidden = [layer.output for layer in model.layers]
        score = model.output[:, 0].sum()
        with score.backward():
            for number in (2, 1, 0):
                effects[number] = ((base[number] - hidden[number]) * hidden[number].grad).sum()
    model._module.zero_grad()
    values, wanted = gradients_by_hooks(model._module, corrupt, lambda out: out[:, 0].sum())
    for number in range(3):
        expected = ((base[number] - values[number]) * wanted[number]).sum()
        assert torch.allclose(effects[number], expected)


def test_integrated_gradients_are_those_of_hooks(model):
    steps = 4
    total = torch.zeros(1, WIDTH)
    with model.trace(batch(1)):
        end = model.layers[0].output.detach().save()
    for step in range(1, steps + 1):
        with model.trace(batch(1)):
            point = (end * step / steps).requires_grad_()
            model.layers[0].output = point
            with model.output.sum().backward():
                total += point.grad
    wanted = torch.zeros(1, WIDTH)
    for step in range(1, steps + 1):
        point = (end * step / steps).requires_grad_()
        hook = model._module.layers[0].register_forward_hook(lambda *_, point=point: point)
        (gradient,) = torch.autograd.grad(model._module(batch(1)).sum(), point)
        wanted += gradient
        hook.remove()
    assert torch.allclose(total * end, wanted * end)
