"""Where the families of models differ, and the blocks that every family runs.

A block is written once, over the functions below. Each takes the model as Hugging Face or as vLLM
builds it; they travel with the block as the user's own code does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

PROMPT = "one two three four five six seven eight nine ten eleven twelve"
STEPS = 3


def is_gpt2(model: Any) -> bool:
    return hasattr(model, "transformer")


def trunk_of(model: Any) -> Any:
    return model.transformer if is_gpt2(model) else model.model


def layers_of(model: Any) -> list[Any]:
    trunk = trunk_of(model)
    return list(trunk.h if is_gpt2(model) else trunk.layers)


def embedding_of(model: Any) -> Any:
    trunk = trunk_of(model)
    return trunk.wte if is_gpt2(model) else trunk.embed_tokens


def norm_of(model: Any) -> Any:
    trunk = trunk_of(model)
    return trunk.ln_f if is_gpt2(model) else trunk.norm


def projection_of(layer: Any) -> Any:
    """Return the last linear layer of the attention: below a placeholder on the other stage."""
    return layer.attn.c_proj if hasattr(layer, "attn") else layer.self_attn.o_proj


def first_norm_of(layer: Any) -> Any:
    return layer.ln_1 if hasattr(layer, "ln_1") else layer.input_layernorm


def mlp_of(layer: Any) -> Any:
    """Return the mixture of experts where there is one."""
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


# ------------------------------------------------------------ Hugging Face


def local_rows(value: Any) -> Any:
    """Return the rows ``[T, H]`` of what a module gave; views, so an edit reaches the model."""
    return value[0]


def local_stream(layer: Any) -> Any:
    return layer.output[0]


def local_logits(model: Any) -> Any:
    return model.output.logits[0, -1:]


def local_lens(model: Any, stream: Any) -> Any:
    logits = model.lm_head(norm_of(model)(stream))
    config = model.config
    if config.model_type == "granite":
        return logits / config.logits_scaling
    if config.model_type == "gemma2":
        cap = config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap
    return logits


# ------------------------------------------------------------------- vLLM


def vllm_rows(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def vllm_stream(layer: Any) -> Any:
    out = layer.output
    return out[0] + out[1] if isinstance(out, tuple) else out


def vllm_logits(model: Any) -> Any:
    return model.logits


def vllm_lens(model: Any, stream: Any) -> Any:
    # Gemma2 has no head of its own.
    head = model.lm_head if hasattr(model, "lm_head") else embedding_of(model)
    return model.logits_processor(head, norm_of(model)(stream))


LOCAL = SimpleNamespace(rows=local_rows, stream=local_stream, logits=local_logits, lens=local_lens)
ON_VLLM = SimpleNamespace(rows=vllm_rows, stream=vllm_stream, logits=vllm_logits, lens=vllm_lens)

# ----------------------------------------------------------------- blocks

BLOCKS: dict[str, Callable[[Any], dict[str, Any]]] = {}


def block(function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    BLOCKS[function.__name__] = function
    return function


@block
def reads_below_placeholders_and_of_every_kind(b: Any) -> dict[str, Any]:
    model, ops = b.model, b.ops
    first, last = layers_of(model)
    with b.trace(PROMPT, STEPS) as tracer:
        found = [].save()
        for _ in tracer.iter[:STEPS]:
            values = [
                ops.rows(first_norm_of(first).output),
                ops.rows(projection_of(first).output),
                ops.rows(mlp_of(first).output),
                ops.stream(first),
                ops.rows(projection_of(last).output),
                ops.rows(mlp_of(last).input),
                ops.rows(mlp_of(last).output),
                ops.stream(last),
                ops.rows(norm_of(model).output)[-1],
                ops.logits(model),
            ]
            found.append(values)
    return {"found": found}


@block
def writes_on_both_stages(b: Any) -> dict[str, Any]:
    model, ops = b.model, b.ops
    first, last = layers_of(model)
    with b.trace(PROMPT, STEPS) as tracer:
        logits = [].save()
        for step in tracer.iter[:STEPS]:
            early = ops.rows(projection_of(first).output)
            early[-1] *= 1.5
            ops.rows(mlp_of(first).output)[:] += 0.25
            ops.rows(projection_of(last).output)[-1] += early[-1]
            ops.rows(mlp_of(last).output)[0] -= 0.5 * early[0] + step
            stream = ops.stream(last)
            logits.append((stream[-1], ops.logits(model)))
    return {"logits": logits}


@block
def a_late_value_changes_the_next_step(b: Any) -> dict[str, Any]:
    model, ops = b.model, b.ops
    first, last = layers_of(model)
    with b.trace(PROMPT, STEPS) as tracer:
        found = [].save()
        late = None
        for _ in tracer.iter[:STEPS]:
            if late is not None:
                ops.rows(projection_of(first).output)[:] += 0.5 * late[-1]
            late = ops.rows(mlp_of(last).output)
            found.append(ops.logits(model))
    return {"found": found}


@block
def a_lens_on_every_layer(b: Any) -> dict[str, Any]:
    model, ops = b.model, b.ops
    with b.trace(PROMPT):
        lens = [ops.lens(model, ops.stream(layer)[-2:]) for layer in layers_of(model)].save()
        logits = ops.logits(model).save()
    assert torch.allclose(lens[-1][-1:], logits, atol=1e-3), "the last lens is the logits"
    return {"lens": lens, "logits": logits}


@block
def calls_and_weights_of_both_stages(b: Any) -> dict[str, Any]:
    model, ops = b.model, b.ops
    first, last = layers_of(model)
    with b.trace(PROMPT):
        early = ops.stream(first)
        here = first_norm_of(first)(early)[-1].save()
        there = first_norm_of(last)(early)[-1].save()
        sizes = [first_norm_of(layer).weight.norm() for layer in (first, last)].save()
        final = norm_of(model).weight[:5].save()
        row = embedding_of(model).weight[7042, :8].save()
        logits = ops.logits(model).save()
    return {"here": here, "there": there, "sizes": sizes, "final": final, "row": row} | {
        "logits": logits
    }
