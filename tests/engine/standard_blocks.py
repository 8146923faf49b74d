"""Blocks in standard names: one text for `LanguageModel` and for `VLLM`, nothing translated.

Each takes a model, and what starts a trace of ``num_tokens`` tokens greedily; it works on models
of any number of layers from 2 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnsight_pp import attention_pattern

PROMPT = "The Eiffel Tower is located in the city of"
# What Granite refuses: its layers scale what attention and the feed-forward part give.
OF_PARTS = (
    "every_value_of_the_first_and_the_last_layer",
    "edits_in_place_on_both_ends",
    "steps_of_a_generation",
)
BLOCKS: dict[str, Callable[[Any, Callable[..., Any]], dict[str, Any]]] = {}


def block(
    function: Callable[[Any, Callable[..., Any]], dict[str, Any]],
) -> Callable[[Any, Callable[..., Any]], dict[str, Any]]:
    BLOCKS[function.__name__] = function
    return function


def on_vllm(model: Any) -> Callable[..., Any]:
    return lambda prompt, num_tokens=1: model.trace(
        prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
    )


def on_language_model(model: Any) -> Callable[..., Any]:
    settings = model._module.generation_config
    settings.do_sample, settings.pad_token_id, settings.eos_token_id = False, 0, None
    return lambda prompt, num_tokens=1: model.trace(
        prompt, fn="generate", max_new_tokens=num_tokens
    )


@block
def every_value_of_the_first_and_the_last_layer(model: Any, start: Any) -> dict[str, Any]:
    with start(PROMPT):
        found = [model.embeddings].save()
        for layer in (model.layers[0], model.layers[-1]):
            found.append(layer.residual_in)
            found.append(layer.attn.input)
            found.append(layer.attn.q)
            found.append(layer.attn.k)
            found.append(layer.attn.v)
            found.append(layer.attn.z)
            found.append(layer.attn.output)
            found.append(layer.mlp.input)
            found.append(layer.mlp.output)
            found.append(layer.residual)
        found.append(model.final_norm)
        found.append(model.logits)
    return {"found": found}


@block
def attention_patterns_on_both_ends(model: Any, start: Any) -> dict[str, Any]:
    with start(PROMPT):
        whole = attention_pattern(model.layers[0]).save()
        last = attention_pattern(model.layers[-1], rows=-1).save()
        logits = model.logits.save()
    assert torch.allclose(whole.sum(-1), torch.ones(whole.shape[:2]), atol=1e-4)
    return {"whole": whole, "last": last, "logits": logits}


@block
def the_stream_of_every_layer(model: Any, start: Any) -> dict[str, Any]:
    with start(PROMPT):
        streams = [layer.residual_stream[-2:] for layer in model.layers].save()
    return {"streams": streams}


@block
def edits_in_place_on_both_ends(model: Any, start: Any) -> dict[str, Any]:
    first, last = model.layers[0], model.layers[-1]
    with start(PROMPT):
        first.attn.z[:, 1] = 0
        first.mlp.output[-1] *= 1.5
        first.residual[-1] += first.residual[0]
        last.attn.v[0] *= 0.5
        last.attn_out[2:5] = 0
        last.residual[:, :8] = 1.0
        stream = last.residual.save()
        logits = model.logits.save()
    return {"stream": stream, "logits": logits}


@block
def an_early_stream_replaces_a_late_one(model: Any, start: Any) -> dict[str, Any]:
    with start(PROMPT):
        early = model.layers[0].residual
        model.layers[-1].residual_in = early * 2.0
        entered = model.layers[-1].residual_in.save()
        late = model.layers[-1].residual.save()
        logits = model.logits.save()
    return {"entered": entered, "late": late, "logits": logits}


@block
def steps_of_a_generation(model: Any, start: Any) -> dict[str, Any]:
    late = None
    with start(PROMPT, 3) as tracer:
        found = [].save()
        for step in tracer.iter[:3]:
            if late is not None:
                model.layers[0].residual[-1] += 0.1 * late[-1]
            late = model.layers[-1].mlp_out
            if step == 1:
                model.layers[-1].residual = torch.ones_like(model.layers[-1].residual)
            found.append((late, model.final_norm, model.logits))
    return {"found": found}


@block
def logits_decide_the_token(model: Any, start: Any) -> dict[str, Any]:
    with start(PROMPT, 2) as tracer:
        for step in tracer.iter[:2]:
            model.logits = torch.nn.functional.one_hot(
                torch.tensor([40 + step]), model.logits.shape[-1]
            ).float()
            if step == 1:
                logits = model.logits.save()
    return {"token": int(logits.argmax())}
