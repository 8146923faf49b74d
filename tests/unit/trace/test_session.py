# A block under test binds names, and stands inside another `with`.
import pytest
import torch

from fakes.nets import Net, batch
from nnsight_pp import (
    BarrierError,
    ConfigurationError,
    NNsight,
    NotSupportedError,
    OutOfOrderError,
    save,
)
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.envoys.tree_node import Forest

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


# --------------------------------------------------------------------------------------- sessions


def test_what_one_trace_binds_the_next_can_use_and_only_saved_names_leave(model):
    with model.session():
        with model.trace(X):
            hidden = model.layers[0].output
        if hidden.sum() == hidden.sum():
            with model.trace(X * 2):
                model.layers[0].output = hidden
                out = model.output.save()
    assert torch.equal(out, model._module(X))
    with pytest.raises(UnboundLocalError):
        hidden


def test_an_error_in_a_session_writes_nothing(model):
    with pytest.raises(KeyError):
        with model.session():
            kept = save(1)
            raise KeyError
    with pytest.raises(UnboundLocalError):
        kept


def test_a_session_may_hold_loops_and_invokes(model):
    with model.session():
        sums = save([])
        for factor in (1, 2):
            with model.trace() as tracer:
                with tracer.invoke(X * factor):
                    hidden = model.layers[0].output
            sums.append(hidden)
    assert torch.equal(sums[1], model._module.layers[0](X * 2))


# -------------------------------------------------------------------------------------- the stop


def test_a_stop_ends_the_forward_and_keeps_what_was_saved(model):
    ran = []
    model._module.head.register_forward_hook(lambda *_: ran.append(1))
    with model.trace(X) as tracer:
        hidden = model.layers[1].output.save()
        tracer.stop()
        after = save(1)
    assert torch.equal(hidden, model._module.layers[1](model._module.layers[0](X)))
    assert ran == []
    with pytest.raises(UnboundLocalError):
        after


def test_a_stop_before_any_value_prevents_the_run(model):
    with model.trace(X, fn=None, scale="no number") as tracer:
        kept = save("kept")
        tracer.stop()
    assert kept == "kept"


def test_a_visit_at_which_a_stop_comes_is_completed(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.layers[0].output[:] = 0
            tracer.stop()
        with tracer.invoke(X):
            seen = model.layers[0].output.save()
        with tracer.invoke():
            both = model.layers[0].output.save()
    assert seen.shape == (2, 4)
    assert not both[:2].any()


def test_a_block_that_a_stop_leaves_behind_is_told(model):
    with pytest.raises(OutOfOrderError, match=r"layers\.2"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                model.layers[0].output
                tracer.stop()
            with tracer.invoke(X):
                model.layers[2].output


def test_an_edit_made_at_a_stop_does_not_outlive_the_run(model):
    with model.trace(X) as tracer:
        model.layers[0].output
        tracer.stop()
    assert torch.equal(model.trace(X, trace=False), model._module(X))


# ------------------------------------------------------------------------------------- barriers


def test_a_barrier_lets_all_through_in_the_order_of_arrival(model):
    order = []
    with model.trace() as tracer:
        barrier = tracer.barrier(3)
        for name in "abc":
            with tracer.invoke(X):
                order.append(name)
                barrier()
                order.append(name.upper())
    assert order == ["a", "b", "c", "A", "B", "C"]


def test_a_value_is_handed_over_at_a_barrier_in_the_same_visit(model):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X):
            barrier()
            model.layers[0].output = given * 2  # noqa: F821 - bound by the other invoke
        with tracer.invoke(X):
            given = model.layers[0].output
            barrier()
        with tracer.invoke():
            into = model.layers[1].input.save()
    assert torch.allclose(into[:2], into[2:] * 2)


def test_a_barrier_can_be_used_for_several_rounds(model):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        order = save([])
        for name in "ab":
            with tracer.invoke(X):
                for layer in model.layers:
                    layer.output
                    barrier()
                    order.append(name)
    assert sorted(order) == ["a", "a", "a", "b", "b", "b"]


def test_a_barrier_that_waits_for_too_many_is_an_error(model):
    with pytest.raises(BarrierError, match="never reached by every block"):
        with model.trace() as tracer:
            barrier = tracer.barrier(3)
            with tracer.invoke(X):
                barrier()
            with tracer.invoke(X):
                barrier()


def test_a_barrier_outside_of_a_block_is_refused(model):
    with pytest.raises(ValueError, match="outside of interleaving"):
        model.trace(X).barrier(2)()
    with pytest.raises(ValueError, match="number of blocks"):
        model.trace(X).barrier(0)


# --------------------------------------------------------------------------------------- nesting


def test_a_trace_of_another_model_in_a_block_gives_it_its_names(model):
    other = NNsight(Net(9))
    with model.trace(X):
        with other.trace(X):
            inner = other.layers[0].output
        model.layers[0].output = inner
        out = model.output.save()
    net = model._module
    expected = net.head(net.layers[2](net.layers[1](other._module.layers[0](X))))
    assert torch.equal(out, expected)


def test_a_trace_of_the_same_model_in_a_block_is_refused(model):
    with pytest.raises(ConfigurationError, match="already running"):
        with model.trace(X):
            model.layers[0].output
            with model.trace(X):
                model.layers[0].output


def test_an_error_of_the_model_wins_over_what_its_blocks_raise_then(model):
    def fails(value):
        model._module.layers[0](value)
        raise ZeroDivisionError

    with pytest.warns(UserWarning, match="being unwound"):
        with pytest.raises(ZeroDivisionError):
            with model.trace(X, fn=fails):
                model.layers[0].output
                try:
                    model.output
                finally:
                    raise KeyError("in the block")


# ------------------------------------------------------------------------------ super in a block


def test_a_bare_super_means_what_it_means_around_the_block(model):
    class Above:
        def factor(self):
            return 2.0

    class Below(Above):
        def factor(self):
            return 5.0

        def scaled(self, model):
            with model.trace(X):
                out = (model.output * super().factor()).save()
            return out

    assert torch.equal(Below().scaled(model), model._module(X) * 2)


# ------------------------------------------------------------------------------------ the engines


class Elsewhere(Envoy):
    """A root whose blocks run in another process."""

    def _new_forest(self, spelling):
        return Forest(spelling, is_split=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.session(),
        lambda model: model.edit(),
        lambda model: model.layers[0].edit(inplace=True),
        lambda model: model.clear_edits(),
        lambda model: model.trace(X, trace=False),
    ],
)
def test_what_only_a_local_model_does_is_refused_elsewhere(use):
    with pytest.raises(NotSupportedError, match="was called"):
        use(Elsewhere(Net()))


@pytest.mark.parametrize("use", ["tracer.stop()", "tracer.cache()", "tracer.barrier(1)()"])
def test_what_only_a_local_run_offers_is_refused_beside_a_backward_pass(model, use):
    with pytest.raises(NotSupportedError, match="tracer"):
        with model.trace(X) as tracer:
            with model.output.sum().backward():
                eval(use)
