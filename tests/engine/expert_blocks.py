"""Blocks about mixtures of experts, for ranks that split every expert.

Each takes a model, its layers, and what gives a layer's mixture, and gives the same on any number
of ranks. Routers see every expert on every rank; what experts give is summed up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from engine.sharded import OTHER, PROMPT, trace

if TYPE_CHECKING:
    from nnsight_pp import VLLM

EXPERTS: dict[str, Callable[..., Any]] = {}
# With an expert that every token goes to.
SHARED: dict[str, Callable[..., Any]] = {}


def experts(function: Callable[..., Any]) -> Callable[..., Any]:
    EXPERTS[function.__name__] = function
    return function


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    SHARED[function.__name__] = function
    return function


@experts
def what_routers_and_experts_give(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model, 3) as tracer:
        found = [].save()
        for _ in tracer.iter[:3]:
            for one in (near, far):
                found.append(one.input)
                found.append(one.gate.output[0])
                found.append(one.experts.inputs)
                found.append(one.experts.output)
                found.append(one.output)
            found.append(model.logits)
    return found


@experts
def an_expert_banned_in_both_layers(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model, 2) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            near.gate.output[0][:, 1] = -1e9
            found.append(near.output)
            scores, rest = far.gate.output
            scores = scores.clone()
            scores[:, 2] = -1e9
            far.gate.output = (scores, rest)
            found.append(far.output)
            found.append(model.logits)
    return found


@experts
def an_expert_chosen_by_another_layers_router(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model):
        early = near.gate.output[0]
        far.gate.output[0][:] = 2 * early.flip(-1)
        late = far.experts.output.save()
        logits = model.logits.save()
    return late, logits


@experts
def what_experts_give_changed(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model):
        near.experts.output[:3] = 0
        near.experts.output[-1] += 1
        out = near.output.save()
        far.experts.output = torch.tanh(far.experts.output)
        late = far.output.save()
        far.output[0] *= 2
        logits = model.logits.save()
    return out, late, logits


@experts
def what_experts_take_changed(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model):
        near.experts.input[2] *= -1
        out = near.output.save()
        far.experts.input = 0.5 * far.experts.input
        late = far.output.save()
        logits = model.logits.save()
    return out, late, logits


@experts
def requests_side_by_side_with_their_own_experts(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        found = [].save()
        for number, prompt in enumerate((PROMPT, OTHER, PROMPT)):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:2]:
                    near.gate.output[0][:, number] += 100
                    found.append(far.experts.output)
                    found.append(model.logits)
    return found


@experts
def a_mixture_called(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model):
        hidden = near.input
        scores = near.gate(hidden)[0].save()
        twice = far(hidden).save()
        same = near(hidden).save()
        out = near.output.save()
        far.output[:] = 0.1 * twice
        logits = model.logits.save()
    return scores, twice, same, out, logits


@shared
def what_a_shared_expert_takes_and_gives(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model, 2) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            for one in (near, far):
                found.append(one.shared_expert.input)
                found.append(one.shared_expert.gate_up_proj.output[0])
                found.append(one.shared_expert.act_fn.output)
                found.append(one.shared_expert.down_proj.output[0])
                found.append(one.shared_expert_gate.output[0])
                found.append(one.shared_expert.output)
            found.append(model.logits)
    return found


@shared
def a_shared_expert_changed(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model, 2) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            near.shared_expert.input[-1] *= 2
            near.shared_expert.act_fn.output[:, 5] = 1
            near.shared_expert.down_proj.output[0][-1, 3:] += 1
            near.shared_expert_gate.output[0][:] = 0.5
            near.shared_expert.output[-1, :9] = 0
            found.append(near.output)
            far.shared_expert.output = torch.tanh(far.shared_expert.output)
            found.append(far.output)
            found.append(model.logits)
    return found


@shared
def a_shared_expert_called_and_skipped(model: VLLM, layers: Any, mixture: Any) -> Any:
    near, far = mixture(layers[0]), mixture(layers[-1])
    with trace(model):
        own = near.shared_expert(near.input).save()
        same = near.shared_expert.output.clone().save()
        far.shared_expert.skip(3 * own)
        late = far.output.save()
        logits = model.logits.save()
    return own, same, late, logits
