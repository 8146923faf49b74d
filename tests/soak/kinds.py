"""What the soak runs, one kind after the other in a drawn order, on a model of four layers.

Each function runs one or more requests and returns what must be the same each time, on any number
of stages. `NUM_REQUESTS` says how many requests one call of it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nnsight_pp import NNsightError

PROMPTS = ("one two three four five", "a small river", "the last of the three prompts")
LONG = "a river runs past the mill and under the bridge " * 9
GREEDY = {"temperature": 0.0, "ignore_eos": True}

KINDS: dict[str, Callable[[Any], Any]] = {}
NUM_REQUESTS: dict[str, int] = {}


def kind(num_requests: int = 1) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        KINDS[function.__name__] = function
        NUM_REQUESTS[function.__name__] = num_requests
        return function

    return add


class OwnError(Exception):
    """What a block raises."""


@kind()
def reads(model: Any) -> Any:
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            found.append([layer.mlp.output for layer in model.model.layers])
            found.append(model.logits)
    return found


@kind()
def writes_across_stages(model: Any) -> Any:
    layers = model.model.layers
    with model.trace(PROMPTS[1], max_tokens=6, **GREEDY) as tracer:
        logits, late = [].save(), None
        for _ in tracer.iter[:6]:
            early = layers[0].mlp.output
            if late is not None:
                early[-1] += 0.1 * late[-1]
            layers[3].mlp.output[:] += 0.5 * early
            late = layers[3].mlp.output
            logits.append(model.logits)
    return logits


@kind()
def saves_much(model: Any) -> Any:
    layers = model.model.layers
    with model.trace(LONG, max_tokens=1, **GREEDY):
        early = layers[1].mlp.output.repeat(60, 1).save()
        late = layers[2].mlp.output.repeat(60, 1).save()
    return early.sum(), late.sum(), early.shape, late.shape


@kind(2)
def raises(model: Any) -> Any:
    layers, said = model.model.layers, []
    for index in (0, 3):
        try:
            with model.trace(PROMPTS[2], max_tokens=20, **GREEDY):
                value = layers[index].mlp.output
                raise OwnError(f"{value.shape[0]} rows")
        except OwnError as error:
            said.append(str(error))
    return said


@kind(2)
def is_refused(model: Any) -> Any:
    layers, said = model.model.layers, []
    for first, second in ((3, 0), (1, 0)):
        try:
            with model.trace(PROMPTS[2], max_tokens=3, **GREEDY):
                late = layers[first].mlp.output.save()
                early = layers[second].mlp.output.save()
        except NNsightError as error:
            said.append(type(error).__name__)
    return said


@kind(3)
def is_interrupted(model: Any) -> Any:
    """As Ctrl-C in the middle of a run: all its requests are aborted."""
    layers = model.model.layers
    core, num_steps = model._llm.llm_engine, 0
    step = core.step

    def interrupted() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            with model.trace(max_tokens=60, **GREEDY) as tracer:
                for index in (0, 3):
                    with tracer.invoke(PROMPTS[0]):
                        for _ in tracer.iter[:60]:
                            layers[index].mlp.output[:] *= 0.9
                with tracer.invoke(PROMPTS[1]):
                    pass
    return "interrupted"


@kind()
def samples_two_sequences(model: Any) -> Any:
    with model.trace(PROMPTS[0], max_tokens=3, n=2, temperature=0.7, seed=4, ignore_eos=True):
        value = model.model.layers[2].mlp.output.save()
    return value


@kind()
def ends_at_a_string(model: Any) -> Any:
    words = model.generate(PROMPTS[0], max_tokens=4, **GREEDY)[0].outputs[0].text.split()
    with model.trace(PROMPTS[0], max_tokens=9, stop=[words[1]], **GREEDY) as tracer:
        first = model.model.layers[3].mlp.output.save()
        out = tracer.result.save()
    return first, list(out.outputs[0].token_ids)


@kind(2)
def uses_a_session(model: Any) -> Any:
    layers = model.model.layers
    with model.session():
        with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
            early, late = layers[1].mlp.output, layers[3].mlp.output
        with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
            layers[0].mlp.output[-1] += late[-1]
            layers[2].mlp.output[:] += early
            logits = model.logits.save()
    return logits


@kind(2)
def uses_a_stored_edit(model: Any) -> Any:
    layers = model.model.layers
    with model.edit("scaled") as (_, edit):
        layers[1].mlp.output[:] *= 2
        kept = layers[2].mlp.output.sum().save()
    try:
        with model.trace(PROMPTS[1], max_tokens=2, edits=["scaled"], **GREEDY) as tracer:
            logits = model.logits.save()
            out = tracer.result.save()
        plain = model.generate(PROMPTS[1], max_tokens=2, edits=["scaled"], **GREEDY)[0]
    finally:
        edit.clear()
    return logits, out.saves["kept"], plain.saves["kept"]


@kind(3)
def shares_names(model: Any) -> Any:
    layers = model.model.layers
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        found = [].save()
        with tracer.invoke(PROMPTS[0]):
            for step in tracer.iter[:3]:
                clean = layers[0].mlp.output[-1]
        for index in (1, 3):
            with tracer.invoke(PROMPTS[2]):
                for step in tracer.iter[:3]:
                    h = layers[index].mlp.output
                    h[-1] += clean
                    found.append(model.logits)
    return sorted(float(one.norm()) for one in found)


@kind()
def stops_early(model: Any) -> Any:
    with model.trace(PROMPTS[1], max_tokens=90, **GREEDY) as tracer:
        rows = [].save()
        for step in tracer.iter[:]:
            rows.append(model.model.layers[3].mlp.output[-1])
            if step == 2:
                tracer.stop()
    return rows


@kind(6)
def many_at_once(model: Any) -> Any:
    layers = model.model.layers
    with model.trace(max_tokens=4, **GREEDY) as tracer:
        kept = [None] * 4
        kept.save()
        for place, prompt in enumerate((*PROMPTS, LONG)):
            with tracer.invoke(prompt, max_tokens=2 + place):
                layers[place % 4].mlp.output[:] *= 1.1
                kept[place] = layers[3].mlp.output[-1]
        for prompt in PROMPTS[:2]:
            with tracer.invoke(prompt):
                pass
    return kept


@kind(4)
def plain(model: Any) -> Any:
    out = model.generate([*PROMPTS, LONG], max_tokens=6, **GREEDY)
    return [list(one.outputs[0].token_ids) for one in out]


@kind()
def caches_all(model: Any) -> Any:
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        cache = tracer.cache([layer.mlp for layer in model.model.layers])
    return [cache[path].output for path in cache]
