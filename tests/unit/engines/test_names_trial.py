"""The check of the standard names on the values of a trial forward that runs no attention."""

from __future__ import annotations

import torch

from fakes.text_models import decoder_model, word_tokenizer
from nnsight_pp import LanguageModel
from nnsight_pp.engines.vllm.names_trial import NamesTrial
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.serve_point import install_serve_points, module_paths


def without_attention(module):
    """Let the attention of each layer gather nothing, as in an engine's trial forward."""
    for layer in module.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight.data.zero_()
    return module


def tried(module):
    """Return what the check says of ``module``, and whether its attention has added anything."""
    trial = NamesTrial(LanguageModel(module, tokenizer=word_tokenizer()))
    gate = Gate()
    install_serve_points(module_paths(module), gate)
    added = []
    module.model.layers[0].self_attn.register_forward_hook(lambda _, args, out: added.append(out))
    gate.serve = trial.note
    with torch.no_grad():
        module(input_ids=torch.tensor([[5]]), use_cache=False)
        gate.serve = None
        found = trial.untrue(module)
    return found, added[0][0]


def test_noise_stands_in_for_attention_and_true_names_pass():
    found, added = tried(without_attention(decoder_model("llama")))
    assert found == {}
    assert added.abs().min() > 0


def test_a_wrong_name_for_what_attention_adds_is_found_though_none_runs():
    module = without_attention(decoder_model("llama"))
    # As where something stands behind attention that the table does not know.
    for layer in module.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, out: (3 * out[0], *out[1:]))
    found, _ = tried(module)
    assert {f"model.layers.{index}.attn.output" for index in range(3)} <= {*found}
    assert not any("residual" in name for name in found)


def test_a_value_that_does_not_fit_its_lens_makes_every_name_untrue():
    module = without_attention(decoder_model("llama"))
    trial = NamesTrial(LanguageModel(module, tokenizer=word_tokenizer()))
    trial.note(next(iter(trial._places)), "no call of a module")
    assert "model.layers.2.residual" in trial.untrue(module)
