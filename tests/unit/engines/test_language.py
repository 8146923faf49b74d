"""`LanguageModel`: its runs, its invokes, and its loading."""

import pickle
import threading
import warnings

import pytest
import torch

from fakes.text_models import (
    causal_config,
    causal_model,
    masked_model,
    mixture_model,
    translation_model,
    word_tokenizer,
)
from nnsight_pp import (
    ConfigurationError,
    LanguageModel,
    NNsightDeprecationWarning,
    NotSupportedError,
    TransformersModel,
    save,
)

PROMPT, OTHER = "the cat sat", "dog"


@pytest.fixture
def model():
    return LanguageModel(causal_model(), tokenizer=word_tokenizer())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    causal_model().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


# -- runs ------------------------------------------------------------------------------------------


def test_two_names_are_one_class():
    assert TransformersModel is LanguageModel


def test_each_invoke_sees_its_rows_and_an_empty_one_sees_all(model):
    with model.trace() as tracer:
        with tracer.invoke(PROMPT):
            first = model.transformer.h[0].output.save()
        with tracer.invoke([OTHER, PROMPT]):
            second = model.transformer.h[0].output.save()
        with tracer.invoke():
            whole = model.transformer.h[0].output.save()
    assert torch.equal(torch.cat([first, second]), whole)


def test_one_invoke_with_an_input_is_not_cut(model):
    with model.trace() as tracer:
        with tracer.invoke(PROMPT):
            model.transformer.h[0].output = torch.zeros(2, 3, 8)
        with tracer.invoke():
            out = model.transformer.h[1].input.save()
    assert out.shape == (2, 3, 8)


def test_trace_false_runs_the_forward_at_once(model):
    out = model.trace(PROMPT, trace=False)
    assert torch.equal(out.logits, model._module(torch.tensor([[4, 5, 6]])).logits)


def test_fn_is_called_in_place_of_the_model(model):
    with model.trace(PROMPT, fn=lambda **given: given["input_ids"] + 1) as tracer:
        out = tracer.result.save()
    assert out.tolist() == [[5, 6, 7]]


def test_a_part_of_the_model_can_be_run_alone(model):
    hidden = torch.randn(1, 3, 8)
    with model.transformer.h[0].trace(hidden) as tracer:
        out = tracer.result.save()
    assert torch.equal(out, model._module.transformer.h[0](hidden))


def test_generate_in_a_with_runs_a_block_beside_it(model):
    with model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        steps = save([])
        for _ in tracer.iter[:3]:
            steps.append(model.lm_head.output[:, -1].argmax(-1))
        ids = tracer.result.save()
    assert ids.shape == (1, 6)
    assert torch.cat(steps).tolist() == ids[0, 3:].tolist()


def test_generate_without_a_with_returns_the_ids(model):
    ids = model.generate(PROMPT, max_new_tokens=3, do_sample=False)
    expected = model._module.generate(
        torch.tensor([[4, 5, 6]]), attention_mask=torch.ones(1, 3), max_new_tokens=3, pad_token_id=3
    )
    assert torch.equal(ids, expected)


def test_generate_runs_the_invokes_as_one_batch(model):
    with model.generate(max_new_tokens=2, do_sample=False) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.result.save()
        with tracer.invoke(OTHER):
            second = tracer.result.save()
        with tracer.invoke():
            both = tracer.result.save()
    assert torch.equal(both, torch.cat([first, second]))
    alone = model.generate(OTHER, max_new_tokens=2, do_sample=False)
    assert torch.equal(second[:, 2:], alone)


def test_a_change_in_a_step_changes_what_is_generated(model):
    with model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        for _ in tracer.iter[:2]:
            model.lm_head.output[..., 9] = 1e6
        ids = tracer.result.save()
    assert ids[0, 3:].tolist() == [9, 9]


def test_the_streamer_gives_the_prompt_and_then_each_token(model):
    with model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        steps = save([])
        for _ in tracer.iter[:3]:
            steps.append(model.generator.streamer.output)
        ids = tracer.result.save()
    assert [step.numel() for step in steps] == [3, 1, 1]
    assert torch.cat([step.flatten() for step in steps]).tolist() == ids[0].tolist()


def test_a_streamer_of_the_users_is_given_the_same(model):
    class Kept:
        def __init__(self):
            self.values, self.has_ended = [], False

        def put(self, value):
            self.values.append(value)

        def end(self):
            self.has_ended = True

    kept = Kept()
    model.generate(PROMPT, max_new_tokens=2, streamer=kept)
    assert len(kept.values) == 3
    assert kept.has_ended


def test_a_block_may_generate_on_its_own(model):
    alone = model.generate(OTHER, max_new_tokens=2, do_sample=False)
    with model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        own = model.generate(OTHER, max_new_tokens=2, do_sample=False).save()
        tokens = save([])
        for _ in tracer.iter[:3]:
            tokens.append(model.generator.streamer.output)
        ids = tracer.result.save()
    assert torch.equal(own, alone)
    assert torch.cat([one.flatten() for one in tokens]).tolist() == ids[0].tolist()


def test_generate_may_be_named_as_what_is_called(model):
    with model.trace(PROMPT, fn="generate", max_new_tokens=2, do_sample=False) as tracer:
        ids = tracer.result.save()
    assert torch.equal(ids, model.generate(PROMPT, max_new_tokens=2, do_sample=False))


def test_a_pipeline_takes_no_ids(model):
    with pytest.raises(ConfigurationError, match="A pipeline takes its prompt"):
        model.pipe(input_ids=[4, 5])


def test_beams_run_without_the_streamer(model):
    with model.generate(PROMPT, max_new_tokens=2, num_beams=3, do_sample=False) as tracer:
        hidden = model.transformer.h[0].output.save()
        ids = tracer.result.save()
    assert hidden.shape[0] == 3
    assert ids.shape[0] == 1


def test_beams_of_several_invokes_are_each_ones_own(model):
    options = {"max_new_tokens": 2, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    with model.generate(**options) as tracer:
        with tracer.invoke(PROMPT):
            first = model.transformer.h[0].output.save()
            ids = tracer.result.save()
        with tracer.invoke([OTHER, OTHER]):
            second = model.transformer.h[0].output.save()
            model.transformer.h[1].output = torch.zeros_like(model.transformer.h[1].output)
            others = tracer.result.save()
        with tracer.invoke():
            whole = model.transformer.h[0].output.save()
            normed = model.transformer.ln_f.input.save()
    assert torch.equal(torch.cat([first, second]), whole)
    assert [value.shape[0] for value in (first, second, ids, others)] == [3, 6, 2, 4]
    assert not normed[3:].any()
    assert normed[:3].any()
    assert torch.equal(ids, model.generate([PROMPT], **options))


def test_the_output_of_the_generator_is_the_result_and_is_deprecated(model):
    with pytest.warns(NNsightDeprecationWarning, match=r"use tracer\.result"):
        with model.generate(PROMPT, max_new_tokens=1) as tracer:
            through = model.generator.output.save()
            ids = tracer.result.save()
    assert torch.equal(through, ids)


def test_an_encoder_does_not_generate():
    model = LanguageModel(masked_model(), tokenizer=word_tokenizer())
    with pytest.raises(NotSupportedError, match="does not generate"):
        model.generate([4, 5], max_new_tokens=1)


def test_pipe_returns_the_records_of_the_task(model):
    with model.pipe(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        hidden = model.transformer.h[0].output.save()
        records = tracer.result.save()
    assert records[0]["generated_text"].startswith(PROMPT)
    assert hidden.shape[1] == 3
    assert model.pipe(PROMPT, max_new_tokens=2, do_sample=False) == records


def test_pipe_runs_the_invokes_as_one_batch(model):
    with model.pipe(max_new_tokens=1, do_sample=False) as tracer:
        with tracer.invoke(PROMPT):
            hidden = model.transformer.h[0].output.save()
            records = tracer.result.save()
        with tracer.invoke(OTHER):
            other = model.transformer.h[0].output.save()
    assert len(records) == 2
    assert hidden.shape == other.shape == (1, 3, 8)


def test_a_model_with_its_own_decoder_pads_right_and_generates():
    model = LanguageModel(translation_model(), tokenizer=word_tokenizer(pad_token="[PAD]"))
    assert model.tokenizer.padding_side == "right"
    with model.generate(max_new_tokens=3, do_sample=False) as tracer:
        with tracer.invoke(PROMPT):
            pass
        with tracer.invoke(OTHER):
            ids = tracer.result.save()
    alone = model.generate(OTHER, max_new_tokens=3, do_sample=False)
    assert ids[0, : alone.shape[1]].tolist() == alone[0].tolist()


def test_a_trace_without_an_input_is_refused(model):
    with pytest.raises(ConfigurationError, match="needs an input or at least one invoke"):
        with model.generate(max_new_tokens=2):
            pass
    with pytest.raises(ConfigurationError, match="none of its invokes has one"):
        with model.trace() as tracer:
            with tracer.invoke():
                pass


def test_a_block_that_could_travel_runs_here(model):
    scale = 2.0
    with model.trace(PROMPT, remote="local") as tracer:
        hidden = (model.transformer.h[0].output * scale).save()
        logits = tracer.result.logits.save()
    assert hidden.shape == (1, 3, 8)
    assert logits.shape[:2] == (1, 3)


def test_a_block_that_cannot_travel_is_refused(model):
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match="cannot travel"):
        with model.trace(PROMPT, remote="local"):
            kept = lock
            model.output.save()


def test_there_is_no_remote_service(model):
    with pytest.raises(NotSupportedError, match="no remote service"):
        model.trace(PROMPT, remote=True)


# -- loading ---------------------------------------------------------------------------------------


def test_the_tree_is_there_before_the_weights_and_stays(folder):
    model = LanguageModel(folder)
    block = model.transformer.h[1]
    assert not model.dispatched
    assert {value.device.type for value in model._module.parameters()} == {"meta"}
    with model.trace(PROMPT):
        hidden = model.transformer.h[1].output.save()
    assert model.dispatched
    assert model.transformer.h[1] is block
    assert block._module is model._module.transformer.h[1]
    assert torch.isfinite(hidden).all()


def test_what_was_added_before_loading_is_there_after(folder):
    model = LanguageModel(folder)
    model.transformer.adapter = torch.nn.Linear(8, 8)
    with model.trace(PROMPT):
        hidden = model.transformer.h[0].output
        adapted = model.transformer.adapter(hidden).save()
    assert model._module.transformer.adapter is model.transformer.adapter._module
    assert adapted.shape == (1, 3, 8)


def test_a_model_loaded_late_generates(folder):
    model = LanguageModel(folder)
    with model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        first = model.generator.streamer.output.save()
        ids = tracer.result.save()
    assert first.tolist() == [[4, 5, 6]]
    assert ids.shape == (1, 5)


def test_an_edited_copy_and_its_model_load_once(folder):
    model = LanguageModel(folder)
    with model.edit() as (_, edited):
        edited.transformer.h[0].output[:] = 0
    with edited.trace(PROMPT):
        zeroed = edited.transformer.h[0].output.save()
    with model.trace(PROMPT):
        hidden = model.transformer.h[0].output.save()
    assert model.dispatched
    assert model._module is edited._module
    assert not zeroed.any()
    assert hidden.any()


def test_stored_edits_come_first_in_every_kind_of_run(model):
    with model.edit(inplace=True):
        model.lm_head.output[..., 9] = 1e6
    assert model.trace(PROMPT, trace=False).logits[0, -1].argmax() == 9
    assert model.generate(PROMPT, max_new_tokens=1, do_sample=False)[0, -1] == 9
    with model.generate(PROMPT, max_new_tokens=1, do_sample=False) as tracer:
        ids = tracer.result.save()
    assert ids[0, -1] == 9


def test_traces_of_a_session_share_names(model):
    with model.session():
        with model.trace(PROMPT):
            hidden = model.transformer.h[0].output
        with model.trace(OTHER):
            model.transformer.h[0].output = hidden[:, :1]
            out = model.transformer.h[1].input.save()
    assert torch.equal(
        out,
        model._module.transformer.h[0](
            model._module.transformer.wte(torch.tensor([[4]]))
            + model._module.transformer.wpe(torch.tensor([0]))
        ),
    )


def test_a_part_can_have_a_second_name(folder):
    model = LanguageModel(folder, rename={"transformer.h": "layers"})
    assert model.layers is model.transformer.h
    with model.trace(PROMPT):
        hidden = model.layers[0].output.save()
    assert torch.isfinite(hidden).all()


def test_operations_named_before_loading_are_there_after(folder):
    model = LanguageModel(folder)
    operations = model.transformer.h[0].mlp.source
    with model.trace(PROMPT):
        hidden = operations.self_act_0.output.save()
    assert hidden.shape == (1, 3, 32)


def test_a_checkpoint_names_its_task_and_brings_its_tokenizer(folder):
    model = LanguageModel(str(folder))
    assert model.task == "text-generation"
    assert model.repo_id == str(folder)
    assert model.tokenizer.pad_token == "[END]"
    assert model.tokenizer.padding_side == "left"
    assert model.config.n_layer == 2


def test_settings_of_the_tokenizer_win(folder):
    model = LanguageModel(folder, tokenizer_kwargs={"padding_side": "right"})
    assert model.tokenizer.padding_side == "right"


def test_a_run_is_the_same_on_a_model_loaded_late_and_at_once(folder):
    late, now = LanguageModel(folder), LanguageModel(folder, dispatch=True)
    assert now.dispatched
    with late.trace(PROMPT):
        first = late.output.logits.save()
    with now.trace(PROMPT):
        second = now.output.logits.save()
    assert torch.equal(first, second)


def test_a_scan_gives_shapes_and_loads_nothing(folder):
    model = LanguageModel(folder)
    with model.scan(PROMPT):
        hidden = model.transformer.h[1].output.save()
    assert hidden.shape == (1, 3, 8)
    assert not model.dispatched


def test_a_scan_of_a_loaded_model_leaves_it_as_it_was(model):
    before = pickle.dumps(model._module.state_dict())
    with model.scan([PROMPT, OTHER]):
        shape = model.output.logits.shape.save()
    assert shape[:2] == (2, 3)
    assert pickle.dumps(model._module.state_dict()) == before


def test_a_scan_of_a_mixture_of_experts_leaves_how_they_are_computed():
    model = LanguageModel(mixture_model(), tokenizer=word_tokenizer())
    before = model.config._experts_implementation
    with model.scan([PROMPT, OTHER]):
        shape = model.model.layers[0].mlp.output.shape.save()
    assert shape == (2, 3, 8)
    assert model.config._experts_implementation == before


def test_a_changed_configuration_is_built_and_loaded(folder):
    config = causal_config()
    config.n_layer = 1
    model = LanguageModel(folder, config=config, dtype="auto")
    assert len(model.transformer.h) == 1
    model.dispatch()
    assert len(model._module.transformer.h) == 1
    assert model._module.config is not config


def test_the_way_attention_is_computed_is_known_before_loading(folder):
    model = LanguageModel(folder, attn_implementation="eager", dtype=torch.float16)
    assert model.attn_implementation == "eager"
    assert model._module.dtype == torch.float16
    assert model.dispatch().attn_implementation == "eager"


def test_a_task_without_text_is_refused(folder):
    with pytest.raises(ConfigurationError, match="not one of text"):
        LanguageModel(folder, task="image-classification")


def test_a_device_is_given_once(folder):
    with pytest.raises(ConfigurationError, match="`device` and `device_map`"):
        LanguageModel(folder, device="cpu", device_map="auto")


def test_nothing_is_shown_or_warned_about_off_a_terminal(folder, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = LanguageModel(folder, dispatch=True)
        model.generate(PROMPT, max_new_tokens=2)
    assert capfd.readouterr().err == ""


# -- changes before the weights are there ----------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.to(torch.float16),
        lambda model: model.transformer.h[1].half(),
        lambda model: model.requires_grad_(False),
        lambda model: setattr(model.transformer.h[1], "mlp", torch.nn.Identity()),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.ones(3, 3))),
    ],
    ids=["half", "to", "a part", "requires_grad_", "a module set", "a weight set"],
)
def test_a_change_before_the_weights_are_there_is_made_on_them(change, folder):
    model, loaded = LanguageModel(str(folder)), LanguageModel(str(folder), dispatch=True)
    change(model)
    change(loaded)
    assert model.dispatched

    def facts(of):
        named = of._module.named_parameters()
        return [(name, one.dtype, one.shape, one.requires_grad, one.device) for name, one in named]

    assert facts(model) == facts(loaded)
    assert str(model._module) == str(loaded._module)


def test_a_weight_that_is_not_there_yet_shows_its_form_and_is_not_edited(folder):
    model = LanguageModel(str(folder))
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert weight.shape == causal_model().transformer.h[0].mlp.c_fc.weight.shape
    with pytest.raises(RuntimeError, match="inference tensor"), torch.no_grad():
        weight[:] = 0
    assert not model.dispatched
