# A block under test binds names, and stands inside another `with`.
import copy
import functools
import gc
import pickle
import traceback
import weakref

import pytest
import torch
from torch import nn

from nnsight_pp import NNsight, OutOfOrderError, OutsideTraceError, UnknownLocationError
from nnsight_pp.errors import SourceNotAvailable

X = torch.arange(6.0).reshape(2, 3) / 6


def softened(x, by=2):
    y = x / by
    return torch.tanh(y)


def fast_softened(self, x):
    return torch.tanh(x / 2)


def around_softened(x):
    return softened(x) + 1


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.out = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.relu(self.fc(x))
        h = softened(h, by=3)
        return self.out(h)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Small()
        self.second = Small()

    def forward(self, x):
        return self.second(self.first(x))


def parts(small, x):
    """Return what the operations of `Small` compute, by plain torch."""
    rectified = torch.relu(small.fc(x))
    soft = torch.tanh(rectified / 3)
    return rectified, soft, small.out(soft)


@pytest.fixture
def small():
    return Small()


@pytest.fixture
def model(small):
    return NNsight(small)


def wrap(forward, **names):
    """Return a wrapped module whose class has this forward."""
    return NNsight(type("Made", (nn.Module,), {"forward": forward, **names})())


# ---- names --------------------------------------------------------------------------------------


def test_calls_and_assignments_are_named_in_the_order_they_run(model):
    assert list(model.source.names) == [
        "self_fc_0",
        "torch_relu_0",
        "h_0",
        "softened_0",
        "h_1",
        "self_out_0",
    ]


class Spelled(nn.Module):
    def forward(self, x):
        a, b = x * 2, torch.neg(x)
        c = d = x + 1
        e, f = x.split(1, dim=0)
        a += b
        a[0] = torch.abs(c).sum() + (a * d).sum()
        self.kept = [one.mean() for one in x.unbind(0)]
        named: torch.Tensor = a.reshape(-1)[0:2].sum()
        return (lambda y: y.exp())(named + e.sum() + f.sum())


def test_names_follow_the_spelling():
    assert list(NNsight(Spelled()).source.names) == [
        "a_0",
        "torch_neg_0",
        "b_0",
        "x_split_0",
        "torch_abs_0",
        "sum_0",
        "sum_1",
        "a_1",
        "x_unbind_0",
        "one_mean_0",
        "self_kept_0",
        "a_reshape_0",
        "sum_2",
        "named_0",
        "y_exp_0",
        "e_sum_0",
        "f_sum_0",
        "call_0",
    ]


def test_rewriting_changes_no_value():
    module = Spelled()
    expected = module(X)
    model = NNsight(module)
    model.source
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, expected)


def test_operations_can_be_looped_over(model):
    assert [one.name for one in model.source] == list(model.source.names)
    assert len(model.source) == 6
    assert "h_1" in model.source
    assert "h_1" in dir(model.source)


def test_unknown_operation_lists_what_there_is(model):
    with pytest.raises(UnknownLocationError, match="available: self_fc_0, torch_relu_0"):
        model.source.relu_0


def test_printed_form_shows_the_text_and_the_names(model):
    text = repr(model.source).splitlines()
    assert "* def forward(self, x):" in text[0]
    assert next(one for one in text if "self_fc_0" in one).endswith("h = torch.relu(self.fc(x))")
    assert next(one for one in text if "torch_relu_0" in one).endswith("+")


def test_printed_form_of_an_operation_marks_its_line(model):
    text = repr(model.source.self_out_0)
    assert text.startswith("model.source.self_out_0:")
    (marked,) = [one for one in text.splitlines() if one.endswith("<--")]
    assert "return self.out(h)" in marked


# ---- values -------------------------------------------------------------------------------------


def test_output_of_a_call_is_what_it_returns(small, model):
    with model.trace(X):
        rectified = model.source.torch_relu_0.output.save()
    assert torch.equal(rectified, parts(small, X)[0])


def test_output_of_an_assignment_is_what_is_stored(small, model):
    with model.trace(X):
        first = model.source.h_0.output.save()
        second = model.source.h_1.output.save()
    assert torch.equal(first, parts(small, X)[0])
    assert torch.equal(second, parts(small, X)[1])


def test_input_of_a_call(small, model):
    with model.trace(X):
        given = model.source.softened_0.input.save()
        kwargs = model.source.softened_0.inputs[1]
        kwargs.save()
    assert torch.equal(given, parts(small, X)[0])
    assert kwargs == {"by": 3}


def test_input_of_an_assignment_is_its_value(small, model):
    with model.trace(X):
        model.source.h_0.input = model.source.h_0.input * 0
        out = model.output.save()
    assert torch.equal(out, small.out(torch.zeros(2, 3)))


@pytest.mark.parametrize("name", ["torch_relu_0", "h_0"])
def test_an_assigned_output_is_what_the_forward_goes_on_with(small, model, name):
    with model.trace(X):
        getattr(model.source, name).output = torch.ones(2, 3)
        out = model.output.save()
    assert torch.equal(out, small.out(torch.tanh(torch.ones(2, 3) / 3)))


def test_an_edit_in_place_lands(small, model):
    with model.trace(X):
        model.source.h_1.output[:] = 0
        out = model.output.save()
    assert torch.equal(out, small.out(torch.zeros(2, 3)))


def test_an_assigned_input_is_what_is_called_with(small, model):
    with model.trace(X):
        model.source.softened_0.input = torch.ones(2, 3)
        model.source.self_out_0.inputs = ((model.source.self_out_0.input * 2,), {})
        out = model.output.save()
    assert torch.equal(out, small.out(torch.tanh(torch.ones(2, 3) / 3) * 2))


def test_operations_and_modules_in_one_order(small, model):
    model.source
    with model.trace(X):
        inner = model.fc.output.save()
        rectified = model.source.torch_relu_0.output.save()
        last = model.out.output.save()
    assert torch.equal(torch.relu(inner), rectified)
    assert torch.equal(last, parts(small, X)[2])


def test_wrong_order_is_refused(model):
    with pytest.raises(OutOfOrderError, match=r"model\.source\.torch_relu_0\.output#0"):
        with model.trace(X):
            model.source.self_out_0.output
            model.source.torch_relu_0.output


def test_outside_of_a_trace_there_are_names_but_no_values(model):
    with pytest.raises(OutsideTraceError, match="outside of interleaving"):
        model.source.h_0.output


def test_each_invoke_sees_and_edits_its_own_rows(small, model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            first = model.source.h_0.output.clone().save()
            model.source.h_0.output = model.source.h_0.output * 0
        with tracer.invoke(X * 2):
            second = model.source.h_0.output.save()
            out = model.output.save()
    assert torch.allclose(first, parts(small, X)[0])
    assert torch.allclose(second, parts(small, X * 2)[0])
    assert torch.allclose(out, parts(small, X * 2)[2])


class Looping(nn.Module):
    def forward(self, x):
        state = x
        for _ in range(4):
            state = state * 2 + x
        return state


def test_a_loop_in_the_forward_is_visited_step_by_step():
    model = NNsight(Looping())
    states = []
    with model.trace(X) as tracer:
        for step in tracer.iter[:4]:
            states.append(model.source.state_1.output.clone().save())
            if step == 1:
                model.source.state_1.output = torch.zeros(2, 3)
        out = model.output.save()
    assert [round((one / X)[1, 2].item()) for one in states] == [3, 7, 1, 3]
    assert torch.equal(out, states[-1])


def test_a_dead_branch_is_listed_and_never_reached():
    def forward(self, x):
        if x.numel() > 100:
            return torch.neg(x)
        return x + 0

    model = wrap(forward)
    assert "torch_neg_0" in model.source.names
    with pytest.raises(OutOfOrderError):
        with model.trace(X):
            model.source.torch_neg_0.output


def test_inner_functions_are_part_of_the_text():
    def forward(self, x):
        scale = 2

        def inner(y):
            z = torch.neg(y)
            return z * scale

        return inner(x)

    model = wrap(forward)
    assert list(model.source.names) == ["scale_0", "torch_neg_0", "z_0", "inner_0"]
    with model.trace(X):
        model.source.z_0.output = torch.ones(2, 3)
        out = model.output.save()
    assert torch.equal(out, torch.full((2, 3), 2.0))


# ---- what the rewriting keeps -------------------------------------------------------------------


class Parent(nn.Module):
    def forward(self, x):
        return torch.relu(x)


class Child(Parent):
    __scale = 3

    def forward(self, x, *, plus=1):
        """Look at itself in several ways."""
        base = super().forward(x)
        older = super(Child, self).forward(x)  # noqa: UP008 - the name of its own class
        text = """kept
            as it is"""
        assert text == "kept\n            as it is"
        assert "base" in locals()
        assert Child.__scale == self.__scale == __class__.__scale
        return torch.neg(base + older) * self.__scale + plus


def test_a_method_means_what_it_meant_in_its_class():
    module = Child()
    model = NNsight(module)
    model.source
    with model.trace(X, plus=5):
        base = model.source.forward_0.output.save()
        out = model.output.save()
    assert torch.equal(base, torch.relu(X))
    assert torch.equal(out, module(X, plus=5))
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, module(X))


def test_a_local_class_and_what_it_closes_over():
    factor = 2

    class Local(nn.Module):
        def forward(self, x, by=factor):
            kept = isinstance(self, Local)
            return torch.neg(x) * by * factor * kept

    model = NNsight(Local())
    factor = 3
    with model.trace(X):
        negative = model.source.torch_neg_0.output.save()
        out = model.output.save()
    assert torch.equal(out, negative * 6)


def factorial(x, depth=3):
    if depth == 0:
        return torch.ones_like(x)
    return x * depth * factorial(x, depth - 1)


def test_a_function_that_calls_itself():
    def local(x, depth=2):
        return torch.neg(x) if depth == 0 else local(x, depth - 1)

    model = wrap(lambda self, x: factorial(local(x)))
    with model.trace(X):
        negative = model.source.local_0.source.local_0.source.local_0.source.torch_neg_0
        assert torch.equal(negative.output, -X)
        inner = model.source.factorial_0.source.factorial_0.output.save()
        out = model.output.save()
    assert torch.equal(out, factorial(-X))
    assert torch.equal(inner, factorial(-X, 2))


def test_a_lambda_on_the_instance():
    module = Small()
    module.fc.forward = lambda given: torch.neg(given).abs()
    model = NNsight(module)
    assert list(model.fc.source.names) == ["torch_neg_0", "abs_0"]
    with model.trace(X):
        negative = model.fc.source.torch_neg_0.output.save()
    assert torch.equal(negative, -X)


def test_traceback_shows_the_line_of_the_file():
    def forward(self, x):
        y = x + 1
        y = y / {}["nothing"]
        return y

    model = wrap(forward)
    model.source
    with pytest.raises(KeyError) as caught:
        with model.trace(X):
            model.output
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.line) == (__file__, 'y = y / {}["nothing"]')


def test_an_untraced_call_runs_the_forward_as_it_was(small, model):
    ran = []
    model.source
    hook = small.fc.register_forward_hook(lambda *_: ran.append(traceback.extract_stack()))
    assert torch.equal(small(X), parts(small, X)[2])
    hook.remove()
    assert not any("source_calls" in one.filename for one in ran[0])


def test_copies_of_the_module_compute_with_their_own_weights(small, model):
    with model.trace(X):
        model.source.h_0.output
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(other(X), small(X))
        with torch.no_grad():
            other.fc.weight.zero_()
            other.fc.bias.fill_(1)
        again = NNsight(other)
        with again.trace(X):
            rectified = again.source.h_0.output.save()
        assert torch.equal(rectified, torch.ones(2, 3))
    assert torch.equal(small(X), parts(small, X)[2])


def test_a_module_goes_when_its_user_drops_it():
    def run():
        model = NNsight(Small())
        with model.trace(X):
            model.source.softened_0.source.y_0.output.save()
        return weakref.ref(model._module)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_two_trees_over_one_module(small):
    first, second = NNsight(small), NNsight(small)
    with first.trace(X):
        first.source.h_0.output = torch.zeros(2, 3)
        inner = None
        with second.trace(X):
            inner = second.source.h_0.output
        inner.save()
        out = first.output.save()
    assert torch.equal(inner, parts(small, X)[0])
    assert torch.equal(out, small.out(torch.zeros(2, 3)))


# ---- decorators ---------------------------------------------------------------------------------


def passing_on(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def wrapped(function):
    @functools.wraps(function)
    def wrapper(self, *args, extra=0, **kwargs):
        return function(self, *args, **kwargs) + extra

    return wrapper


def test_decorators_go_on_running_around_the_named_function():
    class Decorated(nn.Module):
        @torch.no_grad()
        @passing_on
        @wrapped
        def forward(self, x):
            return torch.neg(x)

    model = NNsight(Decorated())
    assert list(model.source.names) == ["torch_neg_0"]
    x = X.clone().requires_grad_()
    with model.trace(x, extra=2):
        model.source.torch_neg_0.output = model.source.torch_neg_0.output * 2
        out = model.output.save()
    assert torch.equal(out, -2 * X + 2)
    assert not out.requires_grad


def test_what_a_forward_closes_over_and_calls_is_not_taken_for_its_inside():
    def made(act):
        def forward(self, x):
            return act(x * 2)

        return forward

    model = wrap(made(softened))
    assert list(model.source.names) == ["act_0"]


def test_a_dispatcher_is_itself_the_function():
    def dispatching(function):
        def forward(self, x):
            chosen = fast_softened if self.is_fast else function
            return chosen(self, x)

        return forward

    class Dispatched(nn.Module):
        is_fast = True

        @dispatching
        def forward(self, x):
            return torch.neg(x)

    model = NNsight(Dispatched())
    assert list(model.source.names) == ["chosen_0", "chosen_1"]
    with model.trace(X):
        fast = model.source.chosen_1.source.torch_tanh_0.output.save()
    model._module.is_fast = False
    with model.trace(X):
        slow = model.source.chosen_1.source.torch_neg_0.output.save()
    assert torch.equal(fast, torch.tanh(X / 2))
    assert torch.equal(slow, -X)


# ---- looking inside a call ----------------------------------------------------------------------


def test_inside_a_call(small, model):
    with model.trace(X):
        inside = model.source.softened_0.source
        names = list(inside.names).save()
        divided = inside.y_0.output.save()
        model.source.softened_0.source.torch_tanh_0.output = torch.ones(2, 3)
        out = model.output.save()
    assert names == ["y_0", "torch_tanh_0"]
    assert torch.equal(divided, parts(small, X)[0] / 3)
    assert torch.equal(out, small.out(torch.ones(2, 3)))


def test_three_levels_down():
    model = wrap(lambda self, x: around_softened(x))
    with model.trace(X):
        deep = model.source.around_softened_0.source.softened_0.source.torch_tanh_0.output.save()
    assert torch.equal(deep, torch.tanh(X / 2))


class Callable:
    def __call__(self, x):
        return torch.neg(x)


class CallsMany(nn.Module):
    def __init__(self):
        super().__init__()
        self.instance = Callable()
        self.part = functools.partial(softened, by=4)

    def own(self, x):
        return torch.abs(x)

    def forward(self, x):
        return self.part(self.own(self.instance(x)))


def test_inside_methods_partials_and_callable_objects():
    module = CallsMany()
    expected = module(X)
    model = NNsight(module)
    with model.trace(X):
        negative = model.source.self_instance_0.source.torch_neg_0.output.save()
        positive = model.source.self_own_0.source.torch_abs_0.output.save()
        quarter = model.source.self_part_0.source.y_0.output.save()
        out = model.output.save()
    assert torch.equal(negative, -X)
    assert torch.equal(positive, X)
    assert torch.equal(quarter, X / 4)
    assert torch.equal(out, expected)


def test_two_invokes_look_inside_the_same_call(small, model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            divided = model.source.softened_0.source.y_0.output.save()
        with tracer.invoke():
            tanh = model.source.softened_0.source.torch_tanh_0.output.save()
    assert torch.equal(torch.tanh(divided), tanh)
    assert torch.equal(tanh, parts(small, X)[1])


class Repeats(nn.Module):
    def forward(self, x):
        for _ in range(3):
            x = softened(x)
        return x


def test_inside_each_call_of_a_loop():
    model = NNsight(Repeats())
    seen = []
    with model.trace(X) as tracer:
        for _ in tracer.iter[:3]:
            seen.append(model.source.softened_0.source.y_0.output.save())
            seen.append(model.source.softened_0.source.torch_tanh_0.output.save())
    x = X
    for divided, tanh in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(divided, x / 2)
        x = torch.tanh(x / 2)
        assert torch.equal(tanh, x)


def test_inside_a_late_call_of_a_loop_alone():
    model = NNsight(Repeats())
    with model.trace(X) as tracer:
        for _ in tracer.iter[2]:
            last = model.source.softened_0.source.torch_tanh_0.output.save()
        out = model.output.save()
    assert torch.equal(last, out)


def test_looking_inside_after_the_call_is_refused(model):
    with pytest.raises(OutOfOrderError):
        with model.trace(X):
            model.source.softened_0.output
            model.source.softened_0.source


@pytest.mark.parametrize(
    ("name", "says"),
    [("h_0", "assignment"), ("torch_relu_0", "no readable source"), ("self_fc_0", "submodule")],
)
def test_what_has_no_inside(model, name, says):
    with pytest.raises(SourceNotAvailable, match=says):
        with model.trace(X):
            getattr(model.source, name).source


def test_looking_inside_needs_a_trace(model):
    with pytest.raises(SourceNotAvailable, match="inside a trace"):
        model.source.softened_0.source


def test_unknown_operation_inside_a_call(model):
    with pytest.raises(AttributeError, match="available: y_0, torch_tanh_0"):
        with model.trace(X):
            model.source.softened_0.source.nothing_0.output


# ---- the first touch ----------------------------------------------------------------------------


@pytest.fixture
def outer():
    return NNsight(Outer())


def test_first_touch_at_the_modules_input_is_in_time(outer):
    with outer.trace(X):
        given = outer.second.input
        rectified = outer.second.source.h_0.output.save()
    module = outer._module
    assert torch.equal(rectified, parts(module.second, module.first(X))[0])


def test_first_touch_while_the_module_runs_is_refused(outer):
    with pytest.raises(OutOfOrderError, match="touch it before the trace"):
        with outer.trace(X):
            outer.second.fc.output
            outer.second.source.h_0.output
    with outer.trace(X):
        outer.second.fc.output
        rectified = outer.second.source.h_0.output.save()
    assert rectified.shape == (2, 3)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = Small()

    def forward(self, x):
        return self.small(self.small(self.small(x)))


def test_first_touch_after_a_visit_does_not_take_a_later_one_for_it():
    model = NNsight(Twice())
    with pytest.raises(OutOfOrderError, match="touch it before the trace"):
        with model.trace(X):
            model.small.output
            model.small.source.h_0.output


def test_first_touch_in_a_later_turn_of_a_loop_means_that_turn():
    model = NNsight(Twice())
    small = model._module.small
    with model.trace(X) as tracer:
        for step in tracer.iter[:3]:
            given = model.small.input
            if step == 2:
                rectified = model.small.source.h_0.output.save()
    assert torch.equal(rectified, parts(small, small(small(X)))[0])


def test_first_touch_in_a_later_turn_is_never_a_visit_too_late():
    model = NNsight(Twice())
    with pytest.raises(OutOfOrderError, match="touch it before the trace"):
        with model.trace(X) as tracer:
            for step in tracer.iter[:3]:
                if step == 0:
                    model.small.output
                if step == 1:
                    model.small.source.h_0.output


def test_forward_replaced_after_wrapping_has_no_operations(small, model):
    small.fc.forward = lambda x: x
    with pytest.raises(SourceNotAvailable, match="replaced"):
        model.fc.source
    with pytest.warns(UserWarning, match=r"model\.fc was replaced after"):
        again = NNsight(small)
    assert list(again.fc.source.names) == []


def test_forward_without_text_has_no_operations():
    names = {}
    exec("def forward(self, x):\n    return x", names)
    with pytest.raises(SourceNotAvailable, match="no readable source"):
        wrap(names["forward"]).source
