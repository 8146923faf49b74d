# A block under test binds names, and stands inside another `with`.
import contextlib
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fakes.nets import Net, batch
from nnsight_pp import ConfigurationError, NNsight, OutOfOrderError, RowsError, save

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


def test_result_is_what_the_call_returns(model):
    with model.trace(X) as tracer:
        out = model.output.save()
        is_same = (tracer.result is out).save()
    assert is_same
    assert torch.equal(out, model._module(X))


def test_values_stay_in_the_graph(model):
    with model.trace(X) as tracer:
        hidden = model.layers[0].output.save()
        out = tracer.result.save()
    (gradient,) = torch.autograd.grad(out.sum(), hidden)
    assert gradient.shape == hidden.shape


def test_grad_mode_set_in_a_block_does_not_leak_into_the_model(model):
    with model.trace(X) as tracer:
        torch.set_grad_enabled(False)
        hidden = model.layers[0].output
        inside = torch.is_grad_enabled().save()
        out = tracer.result.save()
    assert inside is False
    assert out.requires_grad
    assert torch.is_grad_enabled()


def test_untraced_call_beside_a_trace_is_plain(model):
    expected = model._module(X)
    with model.trace(X):
        model.layers[0].output[:] = 0
    assert torch.equal(model(X), expected)


def test_call_of_a_module_inside_a_block_is_not_served(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            hidden = model.layers[0].output
            lens = model.head(hidden).save()
            again = model.layers[2](hidden).save()
            last = model.layers[2].output.save()
        with tracer.invoke(X):
            head = model.head.output.save()
    assert torch.allclose(lens, model._module.head(model._module.layers[0](X)))
    assert not torch.allclose(again, last)
    assert torch.allclose(head, model._module(X))


def test_plain_torch_call_of_a_module_of_the_tree_inside_a_block(model):
    with model.trace(X):
        model.layers[0].output
        model._module.layers[1](X)
        hidden = model.layers[1].output.save()
    assert torch.equal(hidden, model._module.layers[1](model._module.layers[0](X)))


def test_call_by_another_thread_is_not_part_of_the_run(model):
    found = {}

    def other():
        found["out"] = model._module(X * 3)

    def during(*_):
        handle.remove()  # or the other call would start one more
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    expected = model._module(X * 3)
    handle = model._module.layers[0].register_forward_hook(during)
    with model.trace(X):
        hidden = model.layers[1].output
        hidden[:] = 0
        hidden.save()
    assert torch.equal(found["out"], expected)
    assert (hidden == 0).all()


def test_trace_of_the_same_model_inside_its_own_block_is_refused(model):
    with pytest.raises(ValueError, match="already running a trace"):
        with model.trace(X):
            with model.trace(X):
                hidden = model.layers[0].output.save()
    with model.trace(X):
        hidden = model.layers[0].output.save()
    assert hidden.shape == X.shape


def test_part_of_a_model_can_be_traced_alone(model):
    with model.layers[1].trace(X) as tracer:
        inner = model.layers[1].fc.output.save()
        out = tracer.result.save()
    assert torch.equal(out, model._module.layers[1](X))
    assert torch.equal(inner, model._module.layers[1].fc(X))


def test_value_outside_of_the_traced_part_is_out_of_order(model):
    with pytest.raises(OutOfOrderError, match="already ran past"):
        with model.layers[1].trace(X):
            model.layers[2].output


def test_fn_is_a_method_name_or_a_callable(model):
    with model.trace(X, fn="rollout", steps=2) as tracer:
        named = tracer.result.save()
    with model.trace(X, fn=lambda x: model._module(x).sum()) as tracer:
        called = tracer.result.save()
    assert torch.equal(named, model._module.rollout(X, steps=2))
    assert torch.equal(called, model._module(X).sum())


def test_trace_by_keyword_only(model):
    with model.trace(x=X):
        hidden = model.layers[0].output.save()
    assert hidden.shape == X.shape


def test_trace_without_a_with_does_nothing(model):
    calls = []
    model._module.register_forward_hook(lambda *_: calls.append(1))
    model.trace(X)
    assert calls == []


def test_model_that_catches_everything_cannot_hide_a_blocks_error():
    class Stubborn(Net):
        def forward(self, x):
            for layer in self.layers:
                with contextlib.suppress(Exception):
                    x = layer(x)
            return x

    model = NNsight(Stubborn())
    with pytest.raises(ZeroDivisionError):
        with model.trace(X):
            model.layers[0].output
            1 / 0


def test_model_serves_on_after_an_error(model):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            with model.trace(X):
                model.layers[0].output
                1 / 0
    with model.trace(X) as tracer:
        out = tracer.result.save()
    assert torch.equal(out, model._module(X))


def test_finally_of_a_block_runs_when_the_model_raises(model):
    log = []
    with pytest.raises(RuntimeError):
        with model.trace(torch.ones(1, 9)):
            log.append("begun")
            try:
                model.layers[2].output
            finally:
                log.append("ended")
    assert log == ["begun", "ended"]


# -------------------------------------------------------------------------------------- invokes


@dataclass
class Out:
    hidden: torch.Tensor
    pair: tuple
    loss: torch.Tensor
    note: str


class Rich(nn.Module):
    """Returns a nested value with a tensor that has no batch dimension."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x):
        x = self.inner(x)
        return Out(x, (x * 2, [x * 3]), x.sum(), "note")


def test_nested_value_is_narrowed_and_spliced_by_rows():
    model = NNsight(Rich())
    with model.trace() as tracer:
        with tracer.invoke(batch(1)):
            first = model.output
            first.hidden[:] = 7
            kinds = save((type(first).__name__, first.loss.dim(), first.note))
            shapes = save((first.hidden.shape, first.pair[1][0].shape))
        with tracer.invoke(batch(2)):
            second = model.output.pair[0].save()
        with tracer.invoke():
            whole = save(model.output)
    assert kinds == ("Out", 0, "note")
    assert shapes == ((1, 2), (1, 2))
    assert second.shape == (2, 2)
    assert (whole.hidden[0] == 7).all()
    assert not (whole.hidden[1:] == 7).any()


def test_wrong_number_of_rows_is_refused_at_its_line(model):
    with pytest.raises(RowsError, match="3 rows were assigned, and this prompt has 1"):
        with model.trace() as tracer:
            with tracer.invoke(batch(1)):
                model.layers[0].output = torch.ones(3, 4)
            with tracer.invoke(batch(2)):
                hidden = model.layers[1].output.save()


def test_inputs_that_cannot_be_joined_are_refused(model):
    with pytest.raises(ConfigurationError, match=r"[Bb]atching"):
        with model.trace() as tracer:
            with tracer.invoke(torch.ones(1, 4)):
                a = model.layers[0].output.save()
            with tracer.invoke(torch.ones(1, 5)):
                b = model.layers[0].output.save()
    with pytest.raises(ConfigurationError, match="same arguments"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                a = model.layers[0].output.save()
            with tracer.invoke(X, scale=1.0):
                b = model.layers[0].output.save()


def test_keyword_inputs_are_joined_and_options_must_agree(model):
    with model.trace() as tracer:
        with tracer.invoke(x=batch(1), scale=2.0):
            first = model.layers[0].output.save()
        with tracer.invoke(x=batch(2), scale=2.0):
            second = model.layers[0].output.save()
    assert (len(first), len(second)) == (1, 2)
    with pytest.raises(ConfigurationError, match="different options"):
        with model.trace() as tracer:
            with tracer.invoke(x=batch(1), scale=2.0):
                first = model.layers[0].output.save()
            with tracer.invoke(x=batch(1), scale=3.0):
                second = model.layers[0].output.save()


# ----------------------------------------------------------------------------------- generation


@pytest.fixture(scope="module")
def llama():
    from fakes.models import tiny_llama

    return NNsight(tiny_llama())


IDS = torch.tensor([[3, 7, 11, 5]])
GREEDY = {"fn": "generate", "max_new_tokens": 3, "do_sample": False, "eos_token_id": 31}


@pytest.mark.slow
def test_loop_over_the_steps_of_a_generation(llama):
    with torch.no_grad():
        expected = llama._module.generate(
            IDS, max_new_tokens=3, do_sample=False, eos_token_id=31, pad_token_id=2
        )
        hidden = llama._module.model(expected[:, :-1]).last_hidden_state
    with llama.trace(IDS, **GREEDY, pad_token_id=2) as tracer:
        logits, shapes, states = [].save(), [].save(), [].save()
        for step in tracer.iter[:3]:
            shapes.append(tuple(llama.model.layers[0].output.shape))
            states.append(llama.model.norm.output[:, -1])
            logits.append(llama.lm_head.output[:, -1])
        ids = tracer.result.save()
    assert torch.equal(ids, expected)
    assert shapes == [(1, 4, 32), (1, 1, 32), (1, 1, 32)]
    assert [int(row.argmax()) for row in logits] == expected[0, 4:].tolist()
    for step, state in enumerate(states):
        assert torch.allclose(state, hidden[:, 3 + step], atol=1e-4)


@pytest.mark.slow
def test_edit_at_one_step_of_a_generation_changes_what_follows(llama):
    with llama.trace(IDS, **GREEDY, pad_token_id=2) as tracer:
        for step in tracer.iter[1]:
            llama.lm_head.output[:, :, 9] = 1e4
        ids = tracer.result.save()
    assert ids[0, 5] == 9


@pytest.mark.slow
def test_output_of_transformers_is_narrowed_and_kept_its_kind(llama):
    with llama.trace() as tracer:
        with tracer.invoke(IDS):
            one = llama.output
            kind = type(one).__name__.save()
            shape = tuple(one.logits.shape).save()
            same = (one["logits"] is one.logits).save()
        with tracer.invoke(IDS):
            llama.output.logits[:] = 0
        with tracer.invoke():
            both = llama.output.logits.save()
    assert kind == "CausalLMOutputWithPast"
    assert shape == (1, 4, 32)
    assert same is True
    assert (both[1] == 0).all()
    assert not (both[0] == 0).any()
