# A block under test binds names, and stands inside another `with`.
import gc
import warnings
import weakref

import pytest
import torch

from fakes.nets import Net, batch
from nnsight_pp import (
    BlockShapeError,
    ConfigurationError,
    NNsight,
    OutOfOrderError,
    OutsideTraceError,
    SaveOutsideTraceError,
    save,
)

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


@pytest.fixture
def layers(model):
    return model._module.layers


# ------------------------------------------------------------------------------------------ save


def test_only_saved_names_leave_the_outermost_trace(model):
    with model.trace(X):
        saved = model.layers[0].output.save()
        plain = saved * 2
    assert saved.shape == X.shape
    assert "plain" not in locals()


def test_unsaved_name_keeps_its_old_value(model):
    hidden = "old"
    with model.trace(X):
        hidden = model.layers[0].output
    assert hidden == "old"


def test_save_goes_by_identity(model):
    with model.trace(X):
        first = model.layers[0].output
        second = first
        second.save()
        other = first.clone()
    assert first is second
    assert "other" not in locals()


def test_name_saved_and_bound_again_is_not_returned(model):
    with model.trace(X):
        value = model.layers[0].output.save()
        value = value * 2
    assert "value" not in locals()


def test_saving_twice_and_saving_a_number(model):
    with model.trace(X):
        number = (7.5).save()
        number.save()
        nothing = save(None)
    assert number == 7.5
    assert nothing is None


def test_list_saved_before_it_is_filled(model):
    with model.trace(X):
        values = [].save()
        for layer in model.layers:
            values.append(layer.output)
    assert [value.shape for value in values] == [X.shape] * 3


def test_outer_list_is_changed_without_save(model):
    values = []
    with model.trace(X):
        values.append(model.layers[0].output)
    assert len(values) == 1


def test_save_outside_a_trace_is_refused():
    with pytest.raises(ValueError, match="outside a trace"):
        save(1)
    with pytest.raises(SaveOutsideTraceError, match="outside a trace"):
        torch.ones(1).save()


def test_nothing_is_written_when_the_block_raises(model):
    number = 1
    with pytest.raises(ZeroDivisionError):
        with model.trace(X):
            hidden = model.layers[0].output.save()
            number = (2.5).save()
            1 / 0
    assert number == 1
    assert "hidden" not in locals()


def test_nothing_is_written_when_the_model_raises(model):
    log = []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with model.trace(X) as tracer:
            first = model.layers[0].output.save()
            model.layers[0].output = torch.ones(1, 9)
            out = tracer.result
            log.append(out)
    assert log == []
    assert "first" not in locals()


def test_saved_name_that_a_closure_holds_is_written_to_its_cell(model):
    hidden = None

    def shape():
        return hidden.shape

    with model.trace(X):
        hidden = model.layers[0].output.save()
    assert shape() == X.shape


def test_saved_name_declared_global_is_written_to_the_module(model):
    global _written
    with model.trace(X):
        _written = model.layers[0].output.save()
    assert globals().pop("_written").shape == X.shape


def test_saved_in_an_inner_trace_leaves_the_outer_one(model):
    other = NNsight(Net(5))
    with model.trace(X):
        with other.trace(X):
            inner = other.layers[0].output.save()
        unsaved = inner * 2
    assert inner.shape == X.shape
    assert "unsaved" not in locals()


def test_inner_trace_pushes_all_its_names_into_the_block_around_it(model):
    other = NNsight(Net(5))
    with model.trace(X):
        with other.trace(X):
            inner = other.layers[0].output
        twice = (inner * 2).save()
    assert torch.equal(twice, other._module.layers[0](X) * 2)


# --------------------------------------------------------------------------------------- invokes


def test_each_invoke_sees_its_own_rows(model, layers):
    first, second = batch(1, seed=3), batch(2, seed=4)
    with model.trace() as tracer:
        with tracer.invoke(first):
            one = model.layers[1].output.save()
        with tracer.invoke(second):
            two = model.layers[1].output.save()
        with tracer.invoke():
            both = model.layers[1].output.save()
            out = tracer.result.save()
    whole = layers[1](layers[0](torch.cat([first, second])))
    assert torch.equal(one, whole[:1])
    assert torch.equal(two, whole[1:])
    assert torch.equal(both, whole)
    assert out.shape == (3, 2)


def test_edit_of_one_invoke_leaves_the_rows_of_the_others(model):
    first, second = batch(1, seed=3), batch(1, seed=4)
    with model.trace() as tracer:
        with tracer.invoke(first):
            model.layers[0].output[:] = 0
        with tracer.invoke(second):
            model.layers[1].output = model.layers[1].output * 2
        with tracer.invoke():
            one = model.layers[0].output.clone().save()
            two = model.layers[1].output.save()
    plain = torch.cat([first, second])
    hidden = model._module.layers[0](plain)
    assert torch.equal(one[0], torch.zeros(4))
    assert torch.allclose(one[1], hidden[1])
    assert torch.allclose(two[1], model._module.layers[1](hidden)[1] * 2)


def test_lone_invoke_sees_everything(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            hidden = model.layers[0].output.save()
    assert torch.equal(hidden, model._module.layers[0](X))


def test_names_flow_between_invokes_in_the_order_of_the_model(model, layers):
    with model.trace() as tracer:
        with tracer.invoke(X):
            clean = model.layers[0].output
        with tracer.invoke(X * 2):
            patched = model.layers[1].output.save()
            patched[:] = clean
    assert torch.allclose(patched, layers[0](X))


def test_name_of_a_sibling_wins_over_what_an_earlier_run_left(model, layers):
    patched = []
    for scale in (1, 2):
        with model.trace() as tracer:
            with tracer.invoke(X * scale):
                clean = model.layers[0].output.save()
            with tracer.invoke(X):
                hidden = model.layers[1].output
                hidden[:] = clean
                patched.append(hidden)
    assert torch.allclose(patched[0], layers[0](X))
    assert torch.allclose(patched[1], layers[0](X * 2))


def test_name_that_a_sibling_has_not_bound_yet_is_not_taken_from_an_earlier_run(model):
    clean = "left by an earlier run"
    with pytest.raises(NameError, match="'clean' is bound by an earlier invoke"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                clean = model.layers[0].output.save()
            with tracer.invoke(X):
                model.layers[1].output[:] = clean
    assert clean == "left by an earlier run"


def test_name_that_a_finished_sibling_did_not_bind_is_taken_from_around(model):
    factor = 2
    with model.trace() as tracer:
        with tracer.invoke(X):
            if not tracer:
                factor = 3
        with tracer.invoke(X):
            hidden = (model.layers[0].output * factor).save()
    assert torch.allclose(hidden, model._module.layers[0](X) * 2)


def test_invokes_in_a_loop_keep_the_loop_variable_they_saw(model):
    found = {}
    with model.trace() as tracer:
        for index in range(3):
            with tracer.invoke(batch(1, seed=index)):
                found[index] = model.layers[index].output
    assert sorted(found) == [0, 1, 2]


def test_the_variable_of_a_loop_is_not_what_another_invoke_binds(model, layers):
    """As in code that runs from top to bottom; its object may be the same in both loops."""
    found, seen = {}, []
    with model.trace() as tracer:
        with tracer.invoke(batch(1, seed=0)):
            clean = {}
            for index in (0, 1):
                clean[index] = model.layers[index].output
        for index in (0, 1, 0):
            with tracer.invoke(batch(1, seed=1)):
                hidden = model.layers[index].output
                hidden[:] = clean[index]
                seen.append(index)
                found[index] = model.layers[2].output
        with tracer.invoke(batch(1, seed=2)):
            for index in (2,):
                model.layers[index].output
    assert sorted(seen) == [0, 0, 1]
    assert sorted(found) == [0, 1]
    after_all = layers[2](layers[1](layers[0](batch(1, seed=0))))
    assert all(torch.allclose(one, after_all) for one in found.values())


def test_what_the_body_binds_between_two_invokes_counts_for_the_second(model):
    seen = []
    with model.trace() as tracer:
        total = 1
        with tracer.invoke(X):
            total = total + 1
            model.layers[0].output
        with tracer.invoke(X):
            model.layers[1].output
            seen.append(total)
        total = 10
        with tracer.invoke(X):
            model.layers[2].output
            seen.append(total)
    assert seen == [2, 10]


def test_container_saved_in_the_collecting_body(model):
    with model.trace() as tracer:
        values = [].save()
        with tracer.invoke(X):
            values.append(model.layers[0].output)
        with tracer.invoke(X):
            values.append(model.layers[1].output)
    assert len(values) == 2


def test_saved_name_of_two_invokes_is_that_of_the_later_one(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            which = model.layers[2].output.save()
        with tracer.invoke(X * 2):
            which = model.layers[0].output.save()
    assert torch.allclose(which, model._module.layers[0](X * 2))


def test_trace_without_input_and_invokes_is_refused(model):
    with pytest.raises(ValueError, match="needs an input or at least one invoke"):
        with model.trace():
            value = 1
    assert "value" not in locals()


def test_only_an_empty_invoke_is_refused(model):
    with pytest.raises(ConfigurationError, match="needs an input"):
        with model.trace() as tracer:
            with tracer.invoke():
                value = model.layers[0].output.save()
    assert "value" not in locals()


def test_invoke_inside_a_running_model_is_refused(model):
    with pytest.raises(ValueError, match="already running"):
        with model.trace(X) as tracer:
            with tracer.invoke(X):
                value = 1
    assert "value" not in locals()


def test_invoke_inside_an_invoke_is_refused(model):
    with pytest.raises(BlockShapeError, match="already running"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                with tracer.invoke(X):
                    value = 1
    assert "value" not in locals()


def test_body_on_the_line_of_an_invoke_is_refused(model):
    # fmt: off
    with pytest.raises(BlockShapeError, match="own line"):
        with model.trace() as tracer:
            with tracer.invoke(X): value = 1  # noqa: E701
    # fmt: on
    assert "value" not in locals()


def test_reading_a_value_in_the_collecting_body_is_refused(model):
    with pytest.raises(ValueError, match="outside of interleaving"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                hidden = model.layers[0].output.save()
            model.layers[0].output
    assert "hidden" not in locals()


@pytest.mark.parametrize(
    "touch",
    [
        lambda model: model.layers[0].output,
        lambda model: model.layers[0].input,
        lambda model: model.layers[0].inputs,
        lambda model: setattr(model.layers[0], "output", X),
        lambda model: model.trace(X).result,
        lambda model: list(model.trace(X).iter[:2]),
    ],
)
def test_touching_a_value_outside_of_a_run_is_refused(model, touch):
    with pytest.raises(ValueError, match="outside of interleaving") as caught:
        touch(model)
    assert isinstance(caught.value, OutsideTraceError)


# ------------------------------------------------------------------------------------ order


def test_value_that_the_model_has_passed_is_out_of_order(model):
    with pytest.raises(OutOfOrderError, match="already ran past") as caught:
        with model.trace(X):
            late = model.layers[2].output.save()
            early = model.layers[0].output.save()
    assert "model.layers.0.output#0" in str(caught.value)
    assert caught.traceback[-1].lineno + 1 == caught.traceback[0].lineno + 3
    assert "late" not in locals()
    assert "early" not in locals()


def test_error_of_the_block_that_failed_first_is_the_one_raised(model):
    with pytest.raises(ZeroDivisionError):
        with model.trace() as tracer:
            with tracer.invoke(X):
                later = model.layers[2].output.save()
            with tracer.invoke(X):
                model.layers[0].output
                1 / 0
    assert "later" not in locals()


def test_block_may_catch_an_error_of_its_own(model):
    with model.trace(X):
        model.layers[2].output
        try:
            model.layers[0].output
        except OutOfOrderError as error:
            text = str(error).save()
    assert "already ran past" in text


# ------------------------------------------------------------------------------------ loops


def rollout(model, **options):
    return model.trace(X, fn="rollout", **options)


def steps(model, count=3):
    x, found = X, []
    for _ in range(count):
        for layer in model._module.layers:
            x = layer(x)
            found.append(x)
    return found


def test_loop_over_bounded_steps(model):
    expected = steps(model)
    with rollout(model) as tracer:
        values = [].save()
        for step in tracer.iter[:3]:
            values.append((step, model.layers[0].output, model.layers[1].output))
        out = tracer.result.save()
    assert [step for step, *_ in values] == [0, 1, 2]
    for step, first, second in values:
        assert torch.equal(first, expected[3 * step])
        assert torch.equal(second, expected[3 * step + 1])
    assert torch.equal(out, expected[-1])


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        (slice(1, 3), [1, 2]),
        (slice(0, 3, 2), [0, 2]),
        (1, [1]),
        ([0, 2], [0, 2]),
        (slice(1, 1), []),
    ],
)
def test_loop_takes_the_steps_of_its_selection(model, selection, chosen):
    expected = steps(model)
    with rollout(model) as tracer:
        values = [].save()
        for step in tracer.iter[selection]:
            values.append((step, model.layers[1].output))
        after = len(values).save()
    assert [step for step, _ in values] == chosen
    assert all(torch.equal(value, expected[3 * step + 1]) for step, value in values)
    assert after == len(chosen)


@pytest.mark.parametrize("steps", [slice(1, 2), slice(1, 3), slice(2, 3)], ids=str)
@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
def test_what_a_step_has_passed_is_not_taken_from_the_next(model, steps, is_written):
    caught = [].append
    with pytest.raises(
        OutOfOrderError, match=rf"layers.0.output#{steps.start} .*ran past"
    ) as error:
        with model.trace(X, fn="forwards") as tracer:
            for _ in tracer.iter[steps]:
                late = model.layers[1].output
                if is_written:
                    model.layers[0].output = late
                else:
                    caught(model.layers[0].output)
    assert error.traceback[-1].path.name == "test_tracer.py"


def test_a_loop_goes_on_to_nothing_else_once_its_step_has_passed_a_value(model):
    with model.trace(X, fn="forwards") as tracer:
        found = [].save()
        for step in tracer.iter[:3]:
            late = model.layers[1].output
            for place in (model.layers[0], model.head):
                try:
                    found.append((step, place.output))
                except OutOfOrderError:
                    found.append((step, None))
            found.append((step, late))
    assert [step for step, _ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [value is None for _, value in found[3:]] == [True, True, False] * 2


def test_a_module_that_a_forward_calls_twice_means_its_next_visit(model):
    net = model._module
    net.layers[2] = net.layers[0]  # called first and last, before `NNsight` looks
    twice = NNsight(net)
    with twice.trace(X, fn="forwards") as tracer:
        found = [].save()
        for step in tracer.iter[1:2]:
            middle = twice.layers[1].output
            found.append((middle, twice.layers[0].output))
    middle, last = found[0]
    assert torch.equal(last, net.layers[0](middle))
    with twice.trace(X, fn="forwards") as tracer:
        for _ in tracer.iter[1:2]:
            middle = twice.layers[1].output
            twice.layers[0].output = middle * 0
            result = tracer.result.save()
    assert torch.equal(result[1], net.head(torch.zeros_like(X)))
    assert not torch.equal(result[2], result[1])


@pytest.mark.parametrize("form", ["all", "open slice", "bare"])
def test_open_loop_ends_with_the_run_and_warns(model, form):
    with pytest.warns(UserWarning, match="never reached") as caught:
        with rollout(model) as tracer:
            values, closed, trailing = [].save(), [].save(), [].save()
            try:
                loops = {"all": tracer.all, "open slice": lambda: tracer.iter[:]}
                for step in loops.get(form, lambda: tracer.iter)():
                    values.append((step, model.layers[0].output))
            finally:
                closed.append(True)
            trailing.append(True)
    assert [step for step, _ in values] == [0, 1, 2]
    assert closed == [True]
    assert trailing == []
    assert caught[0].filename == __file__


def test_bounded_loop_beyond_the_run_is_cut_and_keeps_what_it_has(model):
    with pytest.warns(UserWarning, match="never reached"):
        with rollout(model) as tracer:
            values = [].save()
            for _ in tracer.iter[:10]:
                values.append(model.layers[2].output)
            trailing = True.save()
    assert len(values) == 3
    assert "trailing" not in locals()


def test_warning_as_an_error_leaves_the_saves(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="never reached"):
            with rollout(model) as tracer:
                values = [].save()
                for _ in tracer.all():
                    values.append(model.layers[2].output)
    assert len(values) == 3


def test_break_and_continue_in_a_loop(model):
    with rollout(model) as tracer:
        values = [].save()
        for step in tracer.iter[:]:
            if step == 0:
                model.layers[0].output
                continue
            values.append(model.layers[0].output)
            break
        after = (1.5).save()
    assert len(values) == 1
    assert torch.equal(values[0], steps(model)[3])
    assert after == 1.5


def test_nested_loops(model):
    with rollout(model) as tracer:
        values = [].save()
        for step in tracer.iter[0:3:2]:
            for layer in model.layers:
                values.append((step, layer.output))
    assert [step for step, _ in values] == [0, 0, 0, 2, 2, 2]
    expected = steps(model)
    assert torch.equal(values[-1][1], expected[8])


def test_loop_inside_a_loop_restores_the_step(model):
    expected = steps(model)
    with rollout(model) as tracer:
        for outer in tracer.iter[0:1]:
            first = model.layers[0].output.save()
            for inner in tracer.iter[1:2]:
                second = model.layers[0].output.save()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[3])


def test_edit_in_a_loop_reaches_every_step(model):
    with rollout(model) as tracer:
        for _ in tracer.iter[:3]:
            model.layers[2].output[:] = 0
        out = tracer.result.save()
    assert torch.equal(out, torch.zeros_like(X))


@pytest.mark.parametrize("selection", [-1, slice(-2, None), slice(0, -1), [0, -1]])
def test_negative_step_is_refused(model, selection):
    with pytest.raises(ValueError, match="negative"):
        with rollout(model) as tracer:
            for _ in tracer.iter[selection]:
                model.layers[0].output


@pytest.mark.parametrize("selection", ["all", 1.0, None, ["a"]])
def test_step_that_is_no_number_is_refused(model, selection):
    with pytest.raises(TypeError):
        with rollout(model) as tracer:
            for _ in tracer.iter[selection]:
                model.layers[0].output


# ------------------------------------------------------------------------------------ lifetimes


def test_finished_trace_keeps_no_value_and_no_scope(model):
    def run():
        with model.trace(X) as tracer:
            hidden = model.layers[0].output
            ref = save(weakref.ref(hidden))
        return ref, weakref.ref(tracer)

    gc.collect()
    gc.disable()
    try:
        value, tracer = run()
        assert value() is None
        assert tracer() is None
    finally:
        gc.enable()


def test_finished_trace_with_invokes_keeps_no_value(model):
    def run():
        with model.trace() as tracer:
            with tracer.invoke(X):
                hidden = model.layers[0].output
                first = save(weakref.ref(hidden))
            with tracer.invoke(X):
                second = save(weakref.ref(model.layers[1].output))
        return first, second

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in run()] == [None, None]
    finally:
        gc.enable()


def test_failed_trace_keeps_nothing_once_its_error_is_gone(model):
    refs = []

    def run():
        with model.trace(X):
            hidden = model.layers[0].output
            refs.append(weakref.ref(hidden))
            1 / 0

    gc.collect()
    gc.disable()
    try:
        try:
            run()
        except ZeroDivisionError:
            pass
        assert refs[0]() is None
    finally:
        gc.enable()


def test_kept_tracer_does_not_keep_the_model():
    model = NNsight(Net())
    ref = weakref.ref(model)
    tracer = model.trace(X)
    with tracer:
        hidden = model.layers[0].output.save()
    del model
    gc.collect()
    assert ref() is None
    assert hidden is not None
    assert tracer.statistics == {}
