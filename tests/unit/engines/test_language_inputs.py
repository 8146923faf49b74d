"""From what a user writes for a prompt to the batch that the model is given."""

import pytest
import torch

from fakes.text_models import causal_model, masked_model, translation_model, word_tokenizer
from nnsight_pp import ConfigurationError, LanguageModel, NotSupportedError


@pytest.fixture
def causal():
    return LanguageModel(causal_model(), tokenizer=word_tokenizer())


@pytest.fixture
def masked():
    return LanguageModel(masked_model(), tokenizer=word_tokenizer(pad_token="[PAD]"))


@pytest.fixture
def translation():
    return LanguageModel(translation_model(), tokenizer=word_tokenizer(pad_token="[PAD]"))


def given_to(model, *prompts):
    """Return the named arguments that ``model`` is called with for one invoke per prompt."""
    with model.trace() as tracer:
        for inputs, kwargs in prompts:
            with tracer.invoke(*inputs, **kwargs):
                pass
        with tracer.invoke():
            given = model.inputs[1].save()
    return given


IDS = [4, 5, 6]


@pytest.mark.parametrize(
    "prompt",
    [
        "the cat sat",
        ["the cat sat"],
        IDS,
        [IDS],
        torch.tensor(IDS),
        torch.tensor([IDS]),
        [torch.tensor(IDS)],
        torch.tensor([IDS]).numpy(),
        {"input_ids": IDS, "attention_mask": [1, 1, 1]},
        {"input_ids": torch.tensor([IDS])},
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_one_prompt_in_every_form_is_the_same_row(causal, prompt):
    given = given_to(causal, ((prompt,), {}))
    assert given["input_ids"].tolist() == [IDS]
    assert given["attention_mask"].tolist() == [[1, 1, 1]]


def test_ids_may_be_keywords(causal):
    with causal.trace(input_ids=torch.tensor([IDS])):
        named = causal.inputs[1].save()
    with causal.trace(**causal.tokenizer("the cat sat", return_tensors="pt")):
        encoded = causal.inputs[1].save()
    assert torch.equal(named["input_ids"], encoded["input_ids"])


def test_a_causal_model_pads_left_and_counts_from_the_first_token(causal):
    given = given_to(causal, (("the cat sat",), {}), (("dog",), {}))
    pad = causal.tokenizer.pad_token_id
    assert given["input_ids"].tolist() == [IDS, [pad, pad, 11]]
    assert given["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert given["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_row_reads_in_a_batch_as_it_does_alone(causal):
    with causal.trace("dog ran"):
        alone = causal.output.logits.save()
    with causal.trace(["the cat sat on a mat", "dog ran"]):
        both = causal.output.logits.save()
    torch.testing.assert_close(both[1, -2:], alone[0], rtol=1e-5, atol=1e-6)


def test_an_encoder_pads_right_and_passes_no_positions(masked):
    given = given_to(masked, (([4, 5, 2],), {}), (([7],), {}))
    assert given["input_ids"].tolist() == [[4, 5, 2], [7, 0, 0]]
    assert "position_ids" not in given


def test_labels_of_tokens_follow_the_side_of_the_ids(causal):
    given = given_to(causal, ((IDS,), {"labels": IDS}), (([7],), {"labels": [7]}))
    assert given["labels"].tolist() == [IDS, [-100, -100, 7]]


def test_labels_of_a_decoder_keep_their_own_length(translation):
    given = given_to(
        translation, ((IDS,), {"labels": [4]}), (([4, 5],), {"labels": [[7, 8, 9, 10]]})
    )
    assert given["labels"].tolist() == [[4, -100, -100, -100], [7, 8, 9, 10]]


def test_fields_of_a_decoder_are_padded_right(translation):
    given = given_to(
        translation,
        ((IDS,), {"decoder_input_ids": [0, 4]}),
        (([5],), {"decoder_input_ids": [0, 4, 5]}),
    )
    assert given["decoder_input_ids"].tolist() == [[0, 4, 0], [0, 4, 5]]


def test_a_field_without_a_default_must_stand_in_every_invoke(translation):
    with pytest.raises(ConfigurationError, match="1 of 2 rows have `decoder_input_ids`"):
        given_to(translation, ((IDS,), {"decoder_input_ids": [0]}), ((IDS,), {}))


def test_rows_of_a_field_are_counted(causal):
    with pytest.raises(ConfigurationError, match="`labels` has 3 rows, but `input_ids` has 2"):
        given_to(causal, (([IDS, IDS],), {"labels": torch.zeros(3, 3)}))
    with pytest.raises(ConfigurationError, match="2 positions for a row of 3"):
        given_to(causal, (([IDS],), {"attention_mask": [[1, 1]]}))


def test_no_pad_token_is_an_error_only_where_one_is_needed(causal):
    causal.tokenizer.pad_token = None
    assert given_to(causal, ((IDS,), {}), ((IDS,), {}))["input_ids"].shape == (2, 3)
    with pytest.raises(ConfigurationError, match="without a pad token"):
        given_to(causal, ((IDS,), {}), (([4],), {}))


def test_a_cache_is_handed_over_as_it_is_and_batches_with_nothing(causal):
    past = causal._module(torch.tensor([IDS]), use_cache=True).past_key_values
    with pytest.raises(NotSupportedError, match="does not support batching"):
        given_to(causal, (([7],), {"past_key_values": past}), ((IDS,), {}))
    expected = causal._module(torch.tensor([[*IDS, 7]])).logits
    with causal.trace([7], past_key_values=past):
        given = causal.inputs[1].save()
        logits = causal.output.logits.save()
    assert "attention_mask" not in given
    torch.testing.assert_close(logits[:, -1], expected[:, -1])


def test_a_chat_is_one_row_made_by_its_template(causal):
    chat = [{"role": "user", "content": "the cat"}]
    other = [*chat, {"role": "bot", "content": "sat"}, {"role": "user", "content": "far"}]
    given = given_to(causal, (([chat, other],), {}))
    words = [causal.tokenizer.decode(row[mask.bool()]) for row, mask in zip(
        given["input_ids"], given["attention_mask"], strict=True
    )]  # fmt: skip
    assert words == ["user : the cat bot :", "user : the cat bot : sat user : far bot :"]


def test_a_chat_that_ends_with_the_assistant_is_gone_on_with(causal):
    causal.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "the "}, {"role": "assistant", "content": "cat sat"}]
    assert given_to(causal, ((chat,), {}))["input_ids"].tolist() == [IDS]


def test_options_of_the_tokenizer_do_not_reach_the_model(causal):
    given = given_to(causal, (("the cat sat on a mat",), {"truncation": True, "max_length": 2}))
    assert given["input_ids"].tolist() == [IDS[:2]]
    assert "max_length" not in given


def test_options_of_the_forward_reach_it(causal):
    with causal.trace(IDS, output_hidden_states=True):
        out = causal.output.save()
    assert len(out.hidden_states) == 3


def test_options_that_differ_between_invokes_are_refused(causal):
    with pytest.raises(ConfigurationError, match="`use_cache` as True and as False"):
        given_to(causal, ((IDS,), {"use_cache": True}), ((IDS,), {"use_cache": False}))


def test_an_option_of_generation_has_no_effect_on_a_trace_and_says_so(causal):
    with pytest.warns(UserWarning, match="max_new_tokens had no effect"):
        with causal.trace(IDS, max_new_tokens=3):
            logits = causal.output.logits.save()
    assert logits.shape[1] == 3


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("", "empty"),
        ([], "cannot be read"),
        (3, "cannot be read"),
        ({"attention_mask": [1]}, "neither text"),
    ],
)
def test_what_is_no_prompt_is_refused(causal, prompt, what):
    with pytest.raises(ConfigurationError, match=what):
        given_to(causal, ((prompt,), {}))


def test_two_prompts_side_by_side_are_refused(causal):
    with pytest.raises(ConfigurationError, match="2 prompts"):
        given_to(causal, (("the", "cat"), {}))


def test_text_for_a_model_without_a_tokenizer_is_refused():
    model = LanguageModel(causal_model())
    assert model.tokenizer is None
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        given_to(model, (("the cat",), {}))


def test_text_without_a_mask_is_refused_where_the_mask_is_the_question(masked):
    with pytest.raises(ConfigurationError, match=r"No mask token"):
        given_to(masked, (("the cat",), {}))
    assert given_to(masked, (("the [MASK]",), {}))["input_ids"].shape == (1, 2)


def test_pairs_of_texts_are_encoded_together(masked):
    masked.task = "text-classification"
    given = given_to(masked, (({"text": "the cat", "text_pair": "sat"},), {}))
    assert given["input_ids"].tolist() == [IDS]


def test_a_mask_beside_a_text_is_the_users(causal):
    given = given_to(causal, (("the cat sat",), {"attention_mask": [[0, 1, 1]]}))
    assert given["attention_mask"].tolist() == [[0, 1, 1]]
    assert given["position_ids"].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("prompt", ["the cat", IDS, [{"role": "user", "content": "the"}]])
def test_ids_beside_another_prompt_are_refused(causal, prompt):
    with pytest.raises(ConfigurationError, match="`input_ids` came beside another prompt"):
        given_to(causal, ((prompt,), {"input_ids": [IDS]}))
