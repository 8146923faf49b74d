"""Blocks about the rest of the surface, for models whose layers several ranks split.

As those of `sharded.py` they take a model and its layers, and give the same on any number of ranks:
weights, caches, names between invokes, sessions, stored edits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.sharded import HEAD, OTHER, PROMPT, trace
from nnsight_pp import NotSupportedError, attention_pattern

if TYPE_CHECKING:
    from engine.backends import Engine
    from nnsight_pp import VLLM

SURFACE: dict[str, Callable[[VLLM, Any], Any]] = {}


def surface(function: Callable[[VLLM, Any], Any]) -> Callable[[VLLM, Any], Any]:
    SURFACE[function.__name__] = function
    return function


@surface
def weights_of_both_ends(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model):
        embedding = model.model.embed_tokens.weight
        rows = embedding[[5, 7042, 49000]].save()
        scale = near.input_layernorm.weight
        own = scale.clone()
        own *= 2
        used = near.mlp.output * own
        late = (far.post_attention_layernorm.weight * own + used[-1]).save()
        # What two ranks hold is each a part, and all of it on one.
        num_rows = embedding.shape[0]
        shard = embedding.local
        places = range(0, num_rows, shard.shape[0])
        is_part = any(torch.equal(embedding[at : at + len(shard)], shard) for at in places)
        facts = [num_rows, len(places) * len(shard), is_part, own.tolist()].save()
        same = torch.equal(far.input_layernorm.weight.local, far.input_layernorm.weight)
        facts.append(same)
    return rows, late, facts


@surface
def edits_of_weights_are_refused(model: VLLM, layers: Any) -> Any:
    found = []
    for edit in ("add_(1)", "zero_()", "local.mul_(2)"):
        for path in ("model.model.norm", "model.model.embed_tokens", "layers[1].input_layernorm"):
            with pytest.raises(NotSupportedError, match="shared by every request"):
                with trace(model):
                    known = (model, layers)
                    layers[1].mlp.output[:] = 1
                    eval(f"{path}.weight.{edit}")
    with trace(model):
        found.append(model.logits.save())
        found.append(model.model.norm.weight.save())
    return found


@surface
def a_cache_of_everything(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with trace(model, 2) as tracer:
        cache = tracer.cache(include_inputs=True)
        near.self_attn.o_proj.input[:, -HEAD:] = 0
    names = [f"model.model.layers.{index}" for index in (1, len(layers) - 1)]
    found = [list(cache.keys())]
    for name in names:
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.act_fn", "mlp.down_proj"):
            entry = cache[f"{name}.{part}"]
            found += [entry.output, entry.inputs]
        found.append(cache[name].output)
    return found, far.path


@surface
def a_cache_of_some_modules(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        caches = [].save()
        for prompt in (PROMPT, OTHER):
            with tracer.invoke(prompt):
                caches.append(tracer.cache([near.mlp.gate_up_proj, far.self_attn.o_proj]))
    return [
        cache[path].output
        for cache in caches
        for path in (near.mlp.gate_up_proj.path, far.self_attn.o_proj.path)
    ]


@surface
def heads_patched_between_invokes(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        logits = [].save()
        with tracer.invoke(PROMPT):
            early = near.self_attn.o_proj.input[-1].clone()
            late = far.mlp.act_fn.output[-1].clone()
            logits.append(model.logits)
        for place in (slice(0, HEAD), slice(-HEAD, None)):
            with tracer.invoke(OTHER):
                heads = near.self_attn.o_proj.input
                heads[-1, place] = early[place]
                neurons = far.mlp.act_fn.output
                neurons[-1] = late
                logits.append(model.logits)
    return logits


@surface
def a_barrier_between_two_invokes(model: VLLM, layers: Any) -> Any:
    near = layers[1]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            heads = near.self_attn.o_proj.input
            barrier()
        with tracer.invoke(OTHER):
            mine = near.self_attn.o_proj.input
            barrier()
            mine[-1] = heads[-1]
            logits = model.logits.save()
    return logits


@surface
def a_session_of_heads(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with model.session():
        with trace(model):
            heads = near.self_attn.o_proj.input
            late = [far.self_attn.qkv_proj.output[0], 2.0]
        with trace(model):
            near.self_attn.qkv_proj.output[0][:] = late[0] / late[1]
            far.self_attn.o_proj.input[:] = 0.5 * heads
            logits = model.logits.save()
        largest = float(heads.norm())
        largest = largest.save()
    return logits, largest


@surface
def stored_edits_of_heads(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with model.edit() as (tracer, edit):
        for _ in tracer.iter[:2]:
            near.self_attn.o_proj.input[:, -HEAD:] = 0
            size = far.self_attn.qkv_proj.output[0].norm().save()
    try:
        with trace(model, 2) as tracer:
            heads = near.self_attn.o_proj.input.save()
            logits = model.logits.save()
            out = tracer.result.save()
        made = model.generate([PROMPT, OTHER], temperature=0.0, max_tokens=2)
    finally:
        edit.clear()
    ids = [list(one.outputs[0].token_ids) for one in (out, *made)]
    return heads, logits, ids, [float(one.saves["size"]) for one in made]


@surface
def an_edit_by_name_for_one_of_two(model: VLLM, layers: Any) -> Any:
    near, far = layers[1], layers[-1]
    with model.edit("closed") as (tracer, _):
        near.mlp.act_fn.output[:] = 0
    try:
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            found = [].save()
            for names in (["closed"], []):
                with tracer.invoke(PROMPT, edits=names):
                    found.append(near.mlp.output)
                    found.append(far.self_attn.o_proj.input)
    finally:
        model.clear_edits()
    return found


def assert_alike_on_every_rank(engine: Engine, folder: Path) -> None:
    """Fail unless every rank's block sees the same bits of each standard value."""
    model = engine.model
    with engine.trace(PROMPT, 2) as tracer:
        for step in tracer.iter[:2]:
            found = [model.embeddings]
            for layer in (model.layers[1], model.layers[-1]):
                if step == 0:
                    found.append(attention_pattern(layer))
                else:
                    found += [layer.attn.q, layer.attn.k, layer.attn.v, layer.attn.z]
                found += [layer.attn_out, layer.mlp_out, layer.residual_stream]
            found += [model.final_norm, model.logits]
            seen = [(value * 1).tolist() for value in found]
            (folder / f"{os.getpid()}-{step}.json").write_text(json.dumps(seen))
    for step in range(2):
        texts = [path.read_text() for path in folder.glob(f"*-{step}.json")]
        assert len(texts) == len(model.statistics())
        assert len(set(texts)) == 1
        assert len(texts[0]) > 10_000
