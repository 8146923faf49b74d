"""Blocks that must be refused: with which error, on which backends, at which line.

The line is marked: the traceback that the user sees must end, within this file, at the line with
`# <-` behind it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.backends import LONGER, PROMPT, SHORT
from matrix.cells import ENGINES, EVERYWHERE, RANKS, SEVERAL, Refused

REFUSED: dict[str, Refused] = {}


def refused(
    error: str,
    words: str,
    where: frozenset[str] = ENGINES,
    runs: frozenset[str] = EVERYWHERE,
) -> Callable[[Callable[[Any], dict[str, Any]]], None]:
    def add(function: Callable[[Any], dict[str, Any]]) -> None:
        REFUSED[function.__name__] = Refused(function, error, words, where, runs)

    return add


# ------------------------------------------------------------------ what an engine does not do


@refused("NotSupportedError", "rewritten forwards")
def source_of_a_forward(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        first = ops.mlp(layers[2])
        text = "down_proj" in str(layers[20].mlp.source)  # <-
        found = text.save()
    return {"found": found}


@refused("NotSupportedError", "does not require grad", EVERYWHERE)
def a_backward_of_what_an_engine_or_no_grad_gives(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        loss = ops.mlp(layers[20]).sum()
        with loss.backward():  # <-
            grad = loss.grad.save()
    return {}


@refused("NotSupportedError", "scan is unavailable on vLLM", runs=ENGINES)
def a_scan(b: Any) -> dict[str, Any]:
    with b.model.scan(PROMPT):  # <-
        shape = b.model.logits.shape.save()
    return {}


@refused("NotSupportedError", "names each value by its step")
def a_call_with_hooks(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early = ops.mlp(layers[3])
        normed = layers[20].input_layernorm(early, hook=True).save()  # <-
    return {"normed": normed}


@refused("NotSupportedError", "only the whole model", runs=ENGINES)
def a_trace_of_one_layer(b: Any) -> dict[str, Any]:
    layers = b.layers
    with layers[3].trace(torch.zeros(1, 576)):  # <-
        out = layers[3].output.save()
    return {}


@refused("NotSupportedError", "inplace", runs=ENGINES)
def an_edited_copy_of_the_model(b: Any) -> dict[str, Any]:
    with b.model.edit(inplace=False):  # <-
        b.layers[3].mlp.output[:] = 0
    return {}


@refused("NotSupportedError", "holds attention", runs=ENGINES)
def a_call_of_attention(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.trace(PROMPT):
        again = layers[3].self_attn(torch.zeros(10), layers[3].input[0]).save()  # <-
    return {}


@refused("NotServedError", "never computed")
def the_module_behind_the_logits(b: Any) -> dict[str, Any]:
    model = b.model
    with b.trace(PROMPT):
        logits = model.lm_head.output.save()  # <-
    return {"logits": logits}


@refused("NotSupportedError", "repacked")
def the_weight_of_a_linear_layer(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.trace(PROMPT):
        size = layers[22].mlp.down_proj.weight.norm().save()  # <-
    return {"size": size}


@refused("NotSupportedError", "set inside a block")
def an_attribute_of_a_module_set(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early = ops.mlp(layers[2]).save()
        layers[3].mlp.scale = 3  # <-
    return {"early": early}


@refused("NotSupportedError", "read in its block")
def a_cache_read_in_its_block(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT) as tracer:
        cache = tracer.cache([layers[4].mlp])
        late = ops.mlp(layers[20]).save()
        paths = list(cache.keys()).save()  # <-
    return {"late": late, "paths": paths}


# ------------------------------------------------------------- several requests, and sessions


@refused("NotSupportedError", "`tracer.stop` was called", runs=ENGINES)
def a_stop_in_invokes_that_share_names(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.model.trace(temperature=0.0, max_tokens=2) as tracer:
        with tracer.invoke(PROMPT):
            value = layers[3].mlp.output
            tracer.stop()  # <-
        with tracer.invoke(PROMPT):
            mine = layers[3].mlp.output
            mine[:] = value
    return {}


@refused("NotSupportedError", "skip", runs=ENGINES)
def a_skip_in_invokes_that_share_names(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.model.trace(temperature=0.0, max_tokens=2) as tracer:
        with tracer.invoke(PROMPT):
            value = layers[3].mlp.output
        with tracer.invoke(PROMPT):
            mine = layers[4].mlp.output
            layers[20].mlp.skip(mine + value)  # <-
    return {}


@refused("NotSupportedError", "n=2", runs=ENGINES)
def two_sequences_in_invokes_that_share_names(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.model.trace(temperature=0.0, max_tokens=2, n=2) as tracer:  # <-
        with tracer.invoke(PROMPT):
            value = layers[3].mlp.output
        with tracer.invoke(PROMPT):
            layers[20].mlp.output[:] = value
    return {}


@refused("ConfigurationError", "max_num_batched_tokens", runs=ENGINES)
def invokes_that_share_names_and_are_too_many_for_a_step(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.model.trace(temperature=0.0, max_tokens=1) as tracer:  # <-
        rows = {}
        for _ in range(4):
            with tracer.invoke(" ".join([LONGER] * 11)):
                rows[len(rows)] = layers[3].mlp.output[-1]
    return {}


@refused("BarrierError", "never reached", runs=ENGINES)
def a_barrier_for_more_blocks_than_there_are(b: Any) -> dict[str, Any]:
    with b.model.trace(temperature=0.0, max_tokens=1) as tracer:
        barrier = tracer.barrier(3)
        for prompt in (PROMPT, SHORT):
            with tracer.invoke(prompt):
                barrier()  # <-
    return {}


@refused("NameError", "has not come that far", runs=ENGINES)
def a_name_of_an_invoke_that_binds_it_later(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            value = layers[20].mlp.output
        with tracer.invoke(PROMPT):
            layers[3].mlp.output[:] = value  # <-
    return {}


@refused("NotSupportedError", "earlier trace of the session")
def a_value_of_an_earlier_trace_edited_in_place(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with model.session():
        with b.trace(PROMPT):
            value = ops.mlp(layers[25])
        with b.trace(PROMPT):
            value[0] = 0  # <-
            ops.mlp(layers[10])[-1] = value[-1]
            logits = ops.logits(model).save()
    return {"logits": logits}


@refused("NotSupportedError", "stored edit", runs=ENGINES)
def two_sequences_with_a_stored_edit(b: Any) -> dict[str, Any]:
    layers, model = b.layers, b.model
    with model.edit("twice") as (_, edit):
        layers[3].mlp.output[:] *= 2
    try:
        with model.trace(PROMPT, max_tokens=1, n=2, edits=["twice"]):  # <-
            logits = model.logits.save()
    finally:
        edit.clear()
    return {}


# ----------------------------------------------------------------------- prompts and options


@refused("ConfigurationError", "one prompt", runs=ENGINES)
def a_list_of_prompts(b: Any) -> dict[str, Any]:
    with b.model.trace([PROMPT, SHORT], max_tokens=1):  # <-
        logits = b.model.logits.save()
    return {}


@refused("ConfigurationError", "maximum context length", runs=ENGINES)
def a_prompt_that_is_too_long(b: Any) -> dict[str, Any]:
    with b.model.trace("word " * 2000, max_tokens=1):  # <-
        logits = b.model.logits.save()
    return {}


@refused("TypeError", "hotness", runs=ENGINES)
def an_option_that_vllm_does_not_know(b: Any) -> dict[str, Any]:
    with b.model.trace(PROMPT, hotness=0.0):  # <-
        logits = b.model.logits.save()
    return {}


# ---------------------------------------------------------------------- order, rows and values


@refused("OutOfOrderError", "layers.3.mlp.output#0", EVERYWHERE)
def an_early_value_asked_for_after_a_late_one(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        late = layers[20].mlp.output.save()
        early = layers[3].mlp.output.save()  # <-
    return {}


@refused("OutOfOrderError", "mlp.skip#0", EVERYWHERE)
def a_skip_of_a_module_that_has_run(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.trace(PROMPT):
        value = layers[21].mlp.output
        layers[21].mlp.skip(value)  # <-
    return {}


@refused("OutOfOrderError", "down_proj.output#0", EVERYWHERE)
def a_part_of_a_skipped_module(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        layers[21].mlp.skip(layers[21].mlp.input)
        inner = layers[21].mlp.down_proj.output.save()  # <-
    return {}


@refused("RowsError", "shape", runs=ENGINES)
def rows_that_are_not_the_requests_own(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.trace(PROMPT):
        layers[23].mlp.output = torch.zeros(3, 576)  # <-
    return {}


@refused("RowsError", "token id", runs=ENGINES)
def a_token_beyond_the_vocabulary(b: Any) -> dict[str, Any]:
    model = b.model
    with b.trace(PROMPT, steps=2):
        model.samples = torch.full_like(model.samples, 10**6)  # <-
    return {}


@refused("UnknownLocationError", "self_attn", EVERYWHERE)
def a_module_that_is_not_there(b: Any) -> dict[str, Any]:
    layers = b.layers
    with b.trace(PROMPT):
        layers[20].self_atn.output.save()  # <-
    return {}


@refused("CacheError", "before reading or modifying", EVERYWHERE)
def a_cache_after_the_first_value(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT) as tracer:
        early = ops.mlp(layers[3])
        cache = tracer.cache()  # <-
    return {}


@refused("ValueUnavailableError", "'rows'")
def a_saved_value_that_nothing_can_send(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):  # <-
        value = ops.mlp(layers[3])
        rows = [(row for row in value)].save()
    return {}


@refused("OutOfOrderError", "input_layernorm.call", frozenset({SEVERAL}))
def a_call_on_the_first_stage_with_a_late_value_in_one_step(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=2):
        late = ops.mlp(layers[22])
        size = layers[1].input_layernorm(late).norm()
        ops.mlp(layers[25])[:] *= 1 + float(size) / 1000
        logits = ops.logits(model).save()  # <-
    return {"logits": logits}


@refused("NotSupportedError", "edited in place", frozenset({SEVERAL}))
def an_augmented_assignment_to_a_tuple_of_another_stage(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        pair = layers[3].inputs
        pair += (3,)
        ops.mlp(layers[20])[:] *= pair[2]  # <-
        logits = ops.logits(model).save()
    return {"logits": logits}


# ------------------------------------------------------------- what each rank computes for itself


@refused("RankDivergenceError", "time, process ids, and set order", frozenset({RANKS, SEVERAL}))
def a_clock_of_every_rank(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        late = ops.mlp(layers[20])
        found = time.time().save()  # <-
    return {"is_later": found > 0}


@refused("RankDivergenceError", "time, process ids, and set order", frozenset({RANKS, SEVERAL}))
def a_value_with_a_process_id_in_it(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        found = (torch.ones(3) * os.getpid()).save()  # <-
        late = ops.mlp(layers[20])
    return {"is_here": bool((found > 0).all())}


@refused("RankDivergenceError", "time, process ids, and set order", frozenset({RANKS, SEVERAL}))
def the_order_of_a_set(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    words = {f"word {number}" for number in range(50)}
    with b.trace(PROMPT):
        early = ops.mlp(layers[3])
        found = list(words).save()  # <-
    return {"num": len(found)}


# ------------------------------------------------------- what a block cannot change around itself


@refused("NotSupportedError", "A builtins.list_iterator from around the block")
def an_iterator_around_the_block_that_goes_on(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    factors = iter([0.5, 2.0])
    with b.trace(PROMPT):  # <-
        late = (ops.mlp(layers[20]) * next(factors)).save()
    return {"late": late, "next": next(factors)}
