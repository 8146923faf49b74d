"""Blocks about values that tensor-parallel ranks hold in pieces.

Each takes a model with four or more heads of size 32, and its layers, and gives the same on any
number of ranks: columns come in the order of the unsplit layer, and an edit lands where it does on
one rank. `near` is a layer of the first stage, `far` one of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nnsight_pp import VLLM

SHARDED: dict[str, Callable[[VLLM, Any], Any]] = {}
PROMPT = "The Eiffel Tower is located in the city of"
OTHER = "My favourite thing about the old town is"
HEAD = 32
# Of a random Qwen2 with the layers and the width that the table's blocks name.
WIDE = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 256,
    "num_attention_heads": 18,
    "num_key_value_heads": 2,
    # Small, as rounding grows from layer to layer.
    "initializer_range": 0.03,
}


def sharded(function: Callable[[VLLM, Any], Any]) -> Callable[[VLLM, Any], Any]:
    SHARDED[function.__name__] = function
    return function


def trace(model: VLLM, steps: int = 1) -> Any:
    return model.trace(PROMPT, temperature=0.0, max_tokens=steps)


@sharded
def fused_columns_in_the_order_of_the_unsplit_layer(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        early = near.self_attn.qkv_proj.output[0].save()
        gates = near.mlp.gate_up_proj.output[0].save()
        late = far.self_attn.qkv_proj.output[0].save()
    return early, gates, late


@sharded
def heads_as_attention_takes_them(model: VLLM, layers: Any) -> Any:
    far = layers[-1]
    with trace(model, 2) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            args, _ = far.self_attn.attn.inputs
            found.append([value.clone() for value in args])
            found.append(far.self_attn.attn.output)
            found.append(far.self_attn.o_proj.input)
    return found


@sharded
def rotary_values(model: VLLM, layers: Any) -> Any:
    near = layers[1]
    with trace(model):
        before = near.self_attn.rotary_emb.inputs.save()
        after = near.self_attn.rotary_emb.output.save()
    return before, after


@sharded
def an_activation_before_and_after(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        given = near.mlp.act_fn.input.save()
        given_back = near.mlp.act_fn.output.save()
        used = far.mlp.down_proj.input.save()
    return given, given_back, used


@sharded
def a_head_of_the_first_rank_zeroed(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        near.self_attn.o_proj.input[:, :HEAD] = 0
        out = near.self_attn.o_proj.output[0].save()
        late = far.mlp.output.save()
        logits = model.logits.save()
    return out, late, logits


@sharded
def a_head_of_the_last_rank_zeroed(model: VLLM, layers: Any) -> Any:
    far = layers[-1]
    with trace(model):
        far.self_attn.o_proj.input[:, -HEAD:] = 0
        out = far.self_attn.o_proj.output[0].save()
        logits = model.logits.save()
    return out, logits


@sharded
def a_head_zeroed_where_attention_gives_it(model: VLLM, layers: Any) -> Any:
    near = layers[1]
    with trace(model, 3) as tracer:
        logits = [].save()
        for step in tracer.iter[:3]:
            near.self_attn.attn.output[:, step * HEAD : (step + 1) * HEAD] = 0
            logits.append(model.logits)
    return logits


@sharded
def added_to_columns_of_query_key_and_value(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        fused = near.self_attn.qkv_proj.output[0]
        columns = torch.linspace(-1, 1, fused.shape[-1])
        fused[:, 3:] += columns[3:]
        heads = near.self_attn.o_proj.input.save()
        fused = far.self_attn.qkv_proj.output[0]
        fused[-1, -1] += 5
        fused[-1, 0] -= 5
        logits = model.logits.save()
    return heads, logits


@sharded
def an_output_of_a_fused_layer_assigned(model: VLLM, layers: Any) -> Any:
    near = layers[1]
    with trace(model):
        fused, bias = near.self_attn.qkv_proj.output
        near.self_attn.qkv_proj.output = (fused.flip(-1) * 0.5, bias)
        heads = near.self_attn.attn.output.save()
        gates, bias = near.mlp.gate_up_proj.output
        near.mlp.gate_up_proj.output = (torch.sin(gates), bias)
        inner = near.mlp.down_proj.input.save()
        logits = model.logits.save()
    return heads, inner, logits


@sharded
def gates_closed(model: VLLM, layers: Any) -> Any:
    near = layers[1]
    with trace(model):
        fused = near.mlp.gate_up_proj.output[0]
        half = fused.shape[-1] // 2
        fused[:, : half // 3] = 0
        fused[:, half + 5] = 1.5
        inner = near.mlp.act_fn.output.save()
        logits = model.logits.save()
    return inner, logits


@sharded
def neurons_of_both_ranks_changed(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        inner = near.mlp.act_fn.output
        inner[:, 0] = 2
        inner[:, -1] = -2
        again = near.mlp.down_proj.input.save()
        far.mlp.down_proj.input = torch.relu(far.mlp.down_proj.input)
        logits = model.logits.save()
    return again, logits


@sharded
def keys_and_values_changed_before_attention(model: VLLM, layers: Any) -> Any:
    far = layers[-1]
    with trace(model, 2) as tracer:
        logits = [].save()
        for _ in tracer.iter[:2]:
            (_, key, value), _ = far.self_attn.attn.inputs
            key[:, -HEAD:] *= 0.5
            value[:, :HEAD] = value[:, HEAD : 2 * HEAD]
            logits.append(model.logits)
    return logits


@sharded
def heads_of_one_layer_put_into_another(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        heads = near.self_attn.o_proj.input
        far.self_attn.o_proj.input[:, HEAD:] = 0.5 * heads[:, :-HEAD]
        logits = model.logits.save()
    return logits


@sharded
def embedded_tokens_and_their_ids(model: VLLM, layers: Any) -> Any:
    embed = model.model.embed_tokens
    with trace(model):
        ids = embed.input.clone().save()
        embed.input[2] = 7042
        rows = embed.output.clone().save()
        embed.output[0] *= 2
        logits = model.logits.save()
    return ids, rows, logits


@sharded
def reduced_outputs_counted_once(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        near.self_attn.o_proj.output[0][:] += 1
        near.mlp.down_proj.output[0][1] = 3
        out = near.mlp.output.save()
        far.mlp.output = far.mlp.output * 2
        logits = model.logits.save()
    return out, logits


@sharded
def calls_of_layers_that_are_split(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        normed = near.input_layernorm.output
        hidden = normed if isinstance(normed, torch.Tensor) else normed[0]
        fused = near.self_attn.qkv_proj(hidden)[0].save()
        gates, _ = near.mlp.gate_up_proj(hidden)
        inner = near.mlp.act_fn(gates)
        out = near.mlp.down_proj(inner)[0].save()
        same = near.mlp(hidden).save()
        heads = near.self_attn.o_proj.input
        mixed = far.self_attn.o_proj(heads * 2)[0].save()
        embedded = model.model.embed_tokens(torch.tensor([5, 7042, 49000])).save()
        logits = model.logits.save()
    return fused, out, same, mixed, embedded, logits


@sharded
def a_lens_and_rows_of_a_split_embedding(model: VLLM, layers: Any) -> Any:
    with trace(model):
        lens = []
        for layer in layers:
            stream = layer.output[0] + layer.output[1]
            lens.append(model.logits_processor(model.lm_head, model.model.norm(stream[-1:])))
        lens.save()
        weight = model.model.embed_tokens.weight
        shape = list(weight.shape).save()
        row = (weight[7042] - weight[49000]).save()
        logits = model.logits.save()
    return lens, shape, row, logits


@sharded
def requests_side_by_side_each_with_its_own_head(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    found: list[Any] = []
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        for number, prompt in enumerate((PROMPT, OTHER, PROMPT)):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:2]:
                    near.self_attn.o_proj.input[:, number * HEAD : (number + 1) * HEAD] = 0
                    found.append(far.self_attn.attn.output)
                    found.append(model.logits)
        with tracer.invoke(OTHER):
            for _ in tracer.iter[:2]:
                found.append(model.logits)
    return found


@sharded
def a_copy_before_the_edit_of_a_fused_value(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        fused = near.self_attn.qkv_proj.output[0]
        before = fused.clone()
        fused[:, ::2] = 0
        after = near.self_attn.attn.output.save()
        kept = before.save()
        far.self_attn.qkv_proj.output[0][:] = before
        logits = model.logits.save()
    return after, kept, logits


@sharded
def numbers_drawn_in_a_block(model: VLLM, layers: Any) -> Any:
    near = layers[1]
    torch.manual_seed(11)
    with trace(model):
        heads = near.self_attn.o_proj.input
        heads += 0.1 * torch.randn_like(heads)
        out = near.self_attn.o_proj.output[0].save()
        logits = model.logits.save()
    return out, logits
