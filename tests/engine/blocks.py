"""The table of blocks: each runs on every backend and must give the reference's values.

Every function runs one trace on the backend that it is given and returns what the trace saved, by
name. SmolLM2 has 30 layers: with two stages layers 0 to 14 are on the first, with three 0 to 9,
10 to 19 and 20 to 29.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from engine.backends import LONGER, PROMPT

BLOCKS: dict[str, Callable[[Any], dict[str, Any]]] = {}
SCALE = 3.0


def block(function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    BLOCKS[function.__name__] = function
    return function


def direction(size: int = 576) -> torch.Tensor:
    return torch.linspace(-1, 1, size)


@block
def read_on_the_first_stage(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.stream(layers[3]).save()
        logits = ops.logits(model).save()
    return {"early": early, "logits": logits}


@block
def read_on_the_last_stage(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        late = ops.stream(layers[27]).save()
    return {"late": late}


@block
def read_on_every_stage(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(LONGER):
        streams = [ops.stream(layers[index]) for index in (0, 9, 14, 15, 20, 29)].save()
        logits = ops.logits(model).save()
    return {"streams": streams, "logits": logits}


@block
def add_a_vector_on_the_first_stage(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    vector = direction()
    with b.trace(PROMPT):
        ops.add(layers[4], SCALE * vector)
        late = ops.stream(layers[25]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def add_a_vector_on_the_last_stage(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    vector = direction()
    with b.trace(PROMPT):
        ops.add(layers[22], SCALE * vector)
        late = ops.stream(layers[25]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def early_value_into_a_late_layer_in_the_same_step(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.stream(layers[5])
        ops.mlp(layers[20])[-1] += 0.5 * early[-1]
        late = ops.stream(layers[28]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def late_value_into_an_early_layer_at_the_next_step(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=4) as tracer:
        logits = [].save()
        late = None
        for _ in tracer.iter[:4]:
            if late is not None:
                ops.add(layers[2], 0.2 * late[-1])
            late = ops.stream(layers[24])
            logits.append(ops.logits(model))
    return {"logits": logits}


@block
def force_an_earlier_value_between_a_read_and_a_write(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.mlp(layers[3])
        here = ops.mlp(layers[21])
        size = early.norm()
        here[:] *= 1 + size / 100
        here[0] = early[-1]
        late = ops.stream(layers[23]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def a_copy_taken_before_the_edit_is_used_on_the_other_stage(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        value = ops.mlp(layers[6])
        before = value.clone()
        value[:] = 0
        ops.mlp(layers[19])[:] += before
        kept = before.save()
        late = ops.stream(layers[26]).save()
        logits = ops.logits(model).save()
    return {"kept": kept, "late": late, "logits": logits}


@block
def a_remote_value_edited_in_place_and_then_used(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.mlp(layers[7])
        early[1:] *= -1
        early += 0.25
        ops.mlp(layers[18])[:] = early
        late_mlp = ops.mlp(layers[25])
        late_mlp[-1] = 2 * late_mlp[0]
        total = late_mlp.sum(0).save()
        logits = ops.logits(model).save()
    return {"total": total, "logits": logits}


@block
def a_branch_on_a_remote_value(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.stream(layers[8])
        if early[-1].mean() > early[0].mean():
            ops.add(layers[17], direction())
            took = "first".save()
        else:
            ops.add(layers[17], -direction())
            took = "second".save()
        if isinstance(early, torch.Tensor) and early.shape[-1] == 576:
            logits = ops.logits(model).save()
    return {"took": took, "logits": logits}


@block
def a_branch_on_a_late_value_before_the_next_step(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=3) as tracer:
        taken = [].save()
        logits = [].save()
        for step in tracer.iter[:3]:
            late = ops.mlp(layers[26])
            taken.append("up" if float(late[-1, 0]) > 0 else "down")
            logits.append(ops.logits(model))
    return {"taken": taken, "logits": logits}


@block
def a_bounded_loop_of_remote_reads_only(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=4) as tracer:
        streams = [].save()
        for _ in tracer.iter[:4]:
            streams.append(ops.mlp(layers[25]))
        after = "reached".save()
    return {"streams": streams, "after": after}


@block
def a_loop_of_first_stage_reads_only(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        streams = [].save()
        for _ in tracer.iter[:3]:
            streams.append(ops.mlp(layers[2]))
    return {"streams": streams}


@block
def logits_of_every_step(b: Any) -> dict[str, Any]:
    model, ops = b.model, b.ops
    with b.trace(PROMPT, steps=4) as tracer:
        logits = []
        logits.save()
        for _ in tracer.iter[:4]:
            logits.append(ops.logits(model))
    return {"logits": logits}


@block
def one_chosen_step(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=4) as tracer:
        first = ops.mlp(layers[1]).save()
        for _ in tracer.iter[2]:
            early = ops.mlp(layers[1]).save()
            late = ops.mlp(layers[28]).save()
        for _ in tracer.iter[3:4]:
            logits = ops.logits(model).save()
    return {"first": first, "early": early, "late": late, "logits": logits}


@block
def steering_at_every_step(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    vector = direction()
    with b.trace(PROMPT, steps=4) as tracer:
        logits = [].save()
        for step in tracer.iter[:4]:
            ops.add(layers[10], (step + 1) * vector)
            ops.add(layers[21], -0.5 * vector)
            logits.append(ops.logits(model))
    return {"logits": logits}


@block
def an_output_replaced_by_a_new_tensor(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        ops.set_mlp(layers[4], torch.zeros_like(ops.mlp(layers[4])))
        again = ops.mlp(layers[4])
        ops.set_mlp(layers[23], again + 0.5)
        late = ops.stream(layers[24]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def an_output_replaced_by_a_remote_value(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        early = ops.mlp(layers[2])
        ops.set_mlp(layers[27], early)
        logits = ops.logits(model).save()
    return {"logits": logits}


@block
def inputs_read_and_replaced(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        first = ops.mlp_input(layers[5])
        ops.set_mlp_input(layers[5], first * 2)
        second = ops.mlp_input(layers[22])
        kept = second.clone().save()
        second[:] = second * 0.5
        late = ops.stream(layers[28]).save()
        logits = ops.logits(model).save()
    return {"kept": kept, "late": late, "logits": logits}


@block
def torch_functions_on_remote_values(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    plain = torch.ones(576)
    with b.trace(PROMPT):
        early = ops.mlp(layers[3])
        middle = ops.mlp(layers[16])
        stacked = torch.stack([early[-1], middle[-1], plain]).save()
        joined = torch.cat([plain[None], early]).save()
        sums = (plain + early[0] + torch.ones_like(middle[0])).save()
        late = ops.mlp(layers[24])
        late[:] = torch.where(late > 0, late, middle)
        number = torch.nn.functional.cosine_similarity(early[-1], late[-1], dim=0).item().save()
        logits = ops.logits(model).save()
    return {
        "stacked": stacked, "joined": joined, "sums": sums, "number": number, "logits": logits,
    }  # fmt: skip


@block
def a_park_inside_torch_on_a_later_value(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        kept = [].save()
        logits = [].save()
        for _ in tracer.iter[:3]:
            late = ops.mlp(layers[27])
            kept.append(torch.ones_like(late) + torch.relu(late))
            logits.append(ops.logits(model))
    return {"kept": kept[:1], "logits": logits[:1], "number": len(kept)}


@block
def nested_containers_of_values(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        found = {
            "early": [ops.mlp(layers[1]), ops.mlp(layers[9])[-1]],
            "late": (ops.mlp(layers[18]), {"deep": ops.mlp(layers[29])[0, :4]}),
            "plain": 3,
        }.save()
    return found


@block
def closures_and_comprehensions(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):

        def size_of(value: Any) -> Any:
            return value.norm() * scale

        scale = 2.0
        early = ops.mlp(layers[4])
        late = ops.mlp(layers[20])
        sizes = [size_of(value) for value in (early, late)].save()
        by_name = {
            name: (lambda value: value.mean())(value)
            for name, value in {"early": early, "late": late}.items()
        }.save()
        root = math.sqrt(float(sizes[0])).save()
    return {"sizes": sizes, "by_name": by_name, "root": root}


@block
def outer_objects_changed_by_the_block(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    seen: list[Any] = ["before"]
    table: dict[str, Any] = {}
    total = torch.zeros(576)
    with b.trace(PROMPT):
        early = ops.mlp(layers[2])
        seen.append(early[-1])
        table["late"] = ops.mlp(layers[19])[0]
        total += early[0]
    return {"seen": seen[1], "number": len(seen), "late": table["late"], "total": total}


@block
def logits_changed_before_sampling(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=2) as tracer:
        chosen = [].save()
        for step in tracer.iter[:2]:
            logits = ops.logits(model)
            if step == 0:
                logits[0, 1000] += 1000.0
            chosen.append(int(logits.argmax()))
    return {"chosen": chosen}


@block
def a_stop_in_the_third_step(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=6) as tracer:
        logits = [].save()
        early = [].save()
        for step in tracer.iter[:]:
            early.append(ops.mlp(layers[3])[-1])
            if step == 2:
                tracer.stop()
            logits.append(ops.logits(model))
    return {"early": early, "logits": logits}


@block
def a_stop_that_hangs_on_a_late_value(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    after = "not reached"
    with b.trace(PROMPT, steps=4) as tracer:
        early = ops.mlp(layers[2]).save()
        ops.mlp(layers[2])[:] *= 2
        late = ops.mlp(layers[27]).save()
        if float(late.norm()) > 0:
            tracer.stop()
        after = "reached".save()
    return {"early": early, "late": late, "after": after}


@block
def layers_skipped_with_their_own_inputs(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        ops.skip_layer(layers[6])
        early = ops.stream(layers[6]).save()
        ops.skip_layer(layers[7])
        ops.skip_layer(layers[21])
        late = ops.stream(layers[25]).save()
        logits = ops.logits(model).save()
    return {"early": early, "late": late, "logits": logits}


@block
def modules_skipped_at_every_step_with_values_of_other_stages(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        kept = [].save()
        logits = [].save()
        for _ in tracer.iter[:3]:
            early = ops.mlp(layers[4])
            ops.skip_mlp(layers[8], torch.zeros_like(early))
            ops.skip_mlp(layers[22], 0.5 * early)
            taken = ops.mlp(layers[22])
            kept.append(taken.clone())
            taken[:] *= 2
            logits.append(ops.logits(model))
    return {"kept": kept, "logits": logits}


@block
def a_skip_in_a_later_step_only(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        first = ops.mlp(layers[20]).save()
        for _ in tracer.iter[1]:
            ops.skip_mlp(layers[20], torch.ones_like(ops.mlp(layers[19])))
        for _ in tracer.iter[2]:
            last = ops.mlp(layers[20]).save()
            logits = ops.logits(model).save()
    return {"first": first, "last": last, "logits": logits}


@block
def a_cache_over_all_stages(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        cache = tracer.cache([layer.mlp for layer in layers])
        for _ in tracer.iter[:3]:
            ops.mlp(layers[5])[:] *= 2
            ops.mlp(layers[25])[:] += 1
    kept = [[ops.rows(value) for value in cache[path].output] for path in cache]
    return {"kept": kept, "paths": cache.keys()}


@block
def a_cache_of_what_went_in_beside_a_skip_and_a_stop(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        cache = tracer.cache(
            [module for layer in layers for module in (layer.mlp, layer.mlp.act_fn)],
            include_output=False,
            include_inputs=True,
            dtype=torch.float64,
        )
        ops.skip_mlp(layers[4], torch.zeros_like(ops.mlp(layers[3])))
        ops.mlp(layers[22])
        tracer.stop()
    kept = [ops.rows(cache[path].input) for path in cache if path.endswith("mlp")]
    return {"kept": kept, "paths": cache.keys()}


@block
def a_stored_edit_before_the_block(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    vector = direction()
    with model.edit(inplace=True):
        early = ops.mlp(layers[3])
        ops.add(layers[4], vector)
        ops.mlp(layers[21])[-1] += early[-1]
    try:
        with b.trace(LONGER):
            late = ops.mlp(layers[21]).save()
            logits = ops.logits(model).save()
    finally:
        model.clear_edits()
    return {"late": late, "logits": logits}


@block
def a_session_that_patches_one_trace_into_the_next(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with model.session():
        with b.trace(LONGER, steps=2) as tracer:
            early = ops.mlp(layers[3])
            found = {"late": [ops.mlp(layers[24])[-1]], "count": 2}
            for _ in tracer.iter[1]:
                found["next"] = ops.mlp(layers[12])
        scale = found["count"] * 0.5
        middle = found["next"][-1] + 0.0
        with b.trace(PROMPT):
            ops.mlp(layers[5])[-1] += found["late"][0]
            ops.mlp(layers[19])[:] += scale * early[-1] + middle
            late = ops.stream(layers[26]).save()
            logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def a_logit_lens_on_every_layer(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        lens = [ops.lens(model, ops.stream(layer)[-1:]) for layer in layers].save()
        logits = ops.logits(model).save()
    return {"lens": lens, "logits": logits}


@block
def calls_used_on_other_stages(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT, steps=3) as tracer:
        found = [].save()
        logits = [].save()
        for _ in tracer.iter[:3]:
            early = ops.mlp(layers[4])
            normed = layers[24].input_layernorm(early)
            again = layers[2].input_layernorm(early)
            late = ops.mlp(layers[22])
            late[:] += normed + again
            # Runs on the first stage, with a value of the last one: one step later.
            found.append(layers[1].input_layernorm(late)[-1])
            logits.append(ops.logits(model))
    return {"found": found, "logits": logits}


@block
def weights_of_every_stage(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        first = layers[3].input_layernorm.weight
        last = layers[26].post_attention_layernorm.weight
        size = (first.norm() + last.norm()).save()
        row = model.model.embed_tokens.weight[7042, :8].save()
        kept = layers[28].input_layernorm.weight.save()
        early = ops.mlp(layers[3]).save()
        ops.mlp(layers[20])[:] += first + 2 * last
        logits = ops.logits(model).save()
    return {"size": size, "row": row, "kept": kept, "early": early, "logits": logits}


CORRUPT = "The Brandenburg Gate is located in the city of"


@block
def a_clean_run_patched_into_a_corrupt_one(b: Any) -> dict[str, Any]:
    """On an engine one trace, whose invokes share names; here one trace after the other."""
    layers, model, ops = b.layers, b.model, b.ops
    places = [(3, 4), (12, -1), (22, 4), (28, -1)]
    patched = {}
    if b.name == "local":
        clean = {}
        with b.trace(PROMPT):
            for layer, _ in places:
                clean[layer] = ops.mlp(layers[layer]).clone().save()
        for layer, position in places:
            with b.trace(CORRUPT):
                ops.mlp(layers[layer])[position] = clean[layer][position]
                patched[layer] = ops.logits(model).save()
        return patched
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            clean = {}
            for index, _ in places:
                clean[index] = ops.mlp(layers[index]).clone()
        for layer, position in places:
            with tracer.invoke(CORRUPT):
                h = ops.mlp(layers[layer])
                h[position] = clean[layer][position]
                patched[layer] = ops.logits(model)
    return patched
