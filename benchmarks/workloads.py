"""What interpretability does with a model, each as one block text that runs on every backend.

A workload takes a model of any engine and a `Task`, and returns a dictionary. A key that begins
with "logits" holds a distribution over next tokens, any other key a value. With the standard names
(`docs/standard_names.md`) the text is the same for Hugging Face's and for vLLM's modules; the two
functions on top hide how a length is written and how a stream is unembedded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import nnsight_pp

ROWS = {"all": slice(None), "last": slice(-1, None)}


def is_vllm(model: Any) -> bool:
    """Say whether ``model`` runs on an engine."""
    return not isinstance(model, nnsight_pp.NNsight)


def unembed(model: Any, stream: Any) -> Any:
    """Return the logits of a stream, by the model's own last norm and head. For use in a block."""
    normed = model.model.norm(stream)
    if is_vllm(model):
        return model.logits_processor(model.lm_head, normed)
    return model.lm_head(normed)


class Task(NamedTuple):
    """What a workload is run on.

    Attributes:
        prompts: One request for each.
        other: A prompt of another content, whose values are patched in. All are as long as this.
        once: The options of a trace that runs the prompts once.
        generating: The options of a trace that generates ``tokens`` of the likeliest tokens.
        tokens: How many.
        layers: Where the model is read or changed.
        rows: Which tokens are.
        push: A direction of the stream, as long as a change shall be.
        encoder: ``[features, H]``, of unit rows, for the workload with a dictionary.
    """

    prompts: tuple[str, ...]
    other: str
    once: dict[str, Any]
    generating: dict[str, Any]
    tokens: int
    layers: tuple[int, ...]
    rows: slice
    push: torch.Tensor
    encoder: torch.Tensor

    @property
    def middle(self) -> int:
        """The layer for what changes only one."""
        return self.layers[len(self.layers) // 2]


def task_for(
    model: Any,
    prompts: tuple[str, ...],
    other: str,
    *,
    tokens: int = 4,
    layers: tuple[int, ...] | None = None,
    rows: str = "all",
    strength: float = 0.5,
) -> Task:
    """Return a task for ``model``; its vectors are the same for each model of one size.

    Args:
        model: Of any engine.
        prompts: One for each request.
        other: A prompt with as many tokens as each of these.
        tokens: How many are generated.
        layers: Which are read or changed. Default: all.
        rows: ``all`` tokens, or the ``last``.
        strength: How far the direction goes, as part of the root of the stream's size.
    """
    hidden = model.config.hidden_size
    if is_vllm(model):
        once = {"temperature": 0.0, "max_tokens": 1}
        generating = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    else:
        once = {}
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        generating = {"fn": "generate", "do_sample": False, **length}
    random = torch.Generator().manual_seed(7)
    push = torch.randn(hidden, generator=random)
    encoder = torch.randn(2 * hidden, hidden, generator=random)
    return Task(
        prompts, other, once, generating, tokens,
        layers if layers is not None else tuple(range(len(model.layers))), ROWS[rows],
        push * strength, torch.nn.functional.normalize(encoder, dim=-1),
    )  # fmt: skip


# ------------------------------------------------------------------------------- the blocks


@torch.no_grad()
def untouched(model: Any, task: Task) -> dict[Any, Any]:
    """Return the logits of each step, of a block that changes nothing."""
    tokens = task.tokens
    with model.trace(**task.generating) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                for step in tracer.iter[:tokens]:
                    got["logits", number, step] = model.logits[0]
    return got


@torch.no_grad()
def logit_lens(model: Any, task: Task) -> dict[Any, Any]:
    """Unembed the stream behind each layer."""
    layers, rows = task.layers, task.rows
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                for index in layers:
                    seen = unembed(model, model.layers[index].residual[rows])
                    got["logits", number, index] = seen[-1]
                    got["best", number, index] = seen.amax(-1)
    return got


@torch.no_grad()
def steering(model: Any, task: Task) -> dict[Any, Any]:
    """Add one vector to the stream of all tokens."""
    layer, rows, push = task.middle, task.rows, task.push
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                model.layers[layer].residual[rows] += push
                got["logits", number, 0] = model.logits[0]
    return got


@torch.no_grad()
def ablation(model: Any, task: Task) -> dict[Any, Any]:
    """Take away a direction of the stream in each layer, then a head, then what a layer adds."""
    layer, layers, rows = task.middle, task.layers, task.rows
    unit = task.push / task.push.norm()
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                for index in layers:
                    stream = model.layers[index].residual
                    stream[rows] -= (stream[rows] @ unit).unsqueeze(-1) * unit
                got["logits", number, "direction"] = model.logits[0]
            with tracer.invoke(prompt):
                model.layers[layer].attn.z[rows, 0] = 0
                got["logits", number, "head"] = model.logits[0]
            with tracer.invoke(prompt):
                model.layers[layer].attn.output[rows] = 0
                model.layers[layer].mlp.output[rows] = 0
                got["logits", number, "layer"] = model.logits[0]
    return got


@torch.no_grad()
def patching(model: Any, task: Task) -> dict[Any, Any]:
    """Put another prompt's stream into each layer and position, one at a time."""
    layers = task.layers
    with model.trace(task.other, **task.once):
        streams = torch.stack([model.layers[index].residual for index in layers]).save()
    positions = range(0, streams.shape[1], max(1, streams.shape[1] // 4))
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            for row, index in enumerate(layers):
                for position in positions:
                    value = streams[row, position].clone()
                    with tracer.invoke(prompt):
                        model.layers[index].residual[position] = value
                        got["logits", number, index, position] = model.logits[0]
    return got


@torch.no_grad()
def generation_steering(model: Any, task: Task) -> dict[Any, Any]:
    """Push the last token of every step, further at each."""
    layer, tokens, push = task.middle, task.tokens, task.push
    with model.trace(**task.generating) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                for step in tracer.iter[:tokens]:
                    model.layers[layer].residual[-1] += (step + 1) * push
                    got["logits", number, step] = model.logits[0]
    return got


@torch.no_grad()
def generation_patching(model: Any, task: Task) -> dict[Any, Any]:
    """Inject another prompt's stream into the prompt, then read what each step makes of it."""
    layer, last, tokens = task.layers[0], task.layers[-1], task.tokens
    with model.trace(task.other, **task.once):
        donor = model.layers[layer].residual.save()
    with model.trace(**task.generating) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                for step in tracer.iter[:tokens]:
                    if step == 0:
                        model.layers[layer].residual[1:] = donor[1:]
                    got["late", number, step] = model.layers[last].residual[-1]
                    got["logits", number, step] = model.logits[0]
    return got


@torch.no_grad()
def attribution(model: Any, task: Task) -> dict[Any, Any]:
    """Say what each part of the model adds to the difference of two logits."""
    layers, tiny = len(model.layers), model.config.rms_norm_eps
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                parts = {"embedding": model.embeddings[-1]}
                for index in range(layers):
                    parts[f"attn {index}"] = model.layers[index].attn.output[-1]
                    parts[f"mlp {index}"] = model.layers[index].mlp.output[-1]
                # The last norm divides all parts by one number: what it does is linear.
                size = (model.layers[-1].residual[-1].pow(2).mean() + tiny).sqrt()
                words = model.model.embed_tokens.weight
                seen = (words[11] - words[12]) * model.model.norm.weight
                for name, part in parts.items():
                    got["part", number, name] = part @ seen / size
                got["logits", number, 0] = model.logits[0]
    return got


def gradient_patching(model: Any, task: Task) -> dict[Any, Any]:
    """Estimate what patching each stream would do, by one backward. For a local model."""
    layers = task.layers
    with model.trace(task.other, **task.once):
        donors = [model.layers[index].residual for index in layers].save()
    got: dict[Any, Any] = {}
    for number, prompt in enumerate(task.prompts):
        with model.trace(prompt, **task.once):
            streams = [model.layers[index].residual for index in layers]
            logits = model.logits[0].save()
            difference = logits[11] - logits[12]
            with difference.backward():
                slopes = [stream.grad for stream in reversed(streams)][::-1]
            rows = zip(donors, streams, slopes, strict=True)
            estimate = [((there - here) * slope).sum(-1) for there, here, slope in rows].save()
        got["logits", number, 0] = logits.detach()
        for index, value in zip(layers, estimate, strict=True):
            got["estimate", number, index] = value.detach()
    return got


@torch.no_grad()
def probe(model: Any, task: Task) -> dict[Any, Any]:
    """Read each token's dot product with a vector, at each step."""
    layers, rows, tokens, push = task.layers, task.rows, task.tokens, task.push
    with model.trace(**task.generating) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                for step in tracer.iter[:tokens]:
                    for index in layers:
                        dots = model.layers[index].residual[rows] @ push
                        got["dots", number, step, index] = dots
                    got["logits", number, step] = model.logits[0]
    return got


@torch.no_grad()
def cache_everything(model: Any, task: Task) -> dict[Any, Any]:
    """Keep every value that has a standard name, of each layer."""
    layers, rows = task.layers, task.rows
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                got["embeddings", number] = model.embeddings[rows]
                for index in layers:
                    layer = model.layers[index]
                    got["q", number, index] = layer.attn.q[rows]
                    got["k", number, index] = layer.attn.k[rows]
                    got["v", number, index] = layer.attn.v[rows]
                    got["z", number, index] = layer.attn.z[rows]
                    got["attn", number, index] = layer.attn.output[rows]
                    got["mlp", number, index] = layer.mlp.output[rows]
                    got["residual", number, index] = layer.residual[rows]
                got["logits", number, 0] = model.logits[0]
    return got


@torch.no_grad()
def dictionary_edit(model: Any, task: Task) -> dict[Any, Any]:
    """Encode the stream of a layer into features, change one, and put the decoded stream back."""
    layer, rows, encoder = task.middle, task.rows, task.encoder
    push = float(4 * task.push.norm())
    with model.trace(**task.once) as tracer:
        got = {}.save()
        for number, prompt in enumerate(task.prompts):
            with tracer.invoke(prompt):
                stream = model.layers[layer].residual
                features = (stream[rows] @ encoder.T).relu()
                rest = stream[rows] - features @ encoder
                features[:, 0] += push
                stream[rows] = features @ encoder + rest
                got["features", number] = features
                got["logits", number, 0] = model.logits[0]
    return got


class Workload(NamedTuple):
    """A row of the tables.

    Attributes:
        title: What it does.
        run: Does it.
        edits: Whether it changes what the model computes: its logits then differ from untouched
            ones. The values of one that only reads differ from prompt to prompt.
        is_local: Whether it needs a graph, which engines do not keep.
    """

    title: str
    run: Callable[[Any, Task], dict[Any, Any]]
    edits: bool
    is_local: bool = False


WORKLOADS = {
    "logit_lens": Workload("logit lens, all layers", logit_lens, False),
    "steering": Workload("steering, all tokens", steering, True),
    "ablation": Workload("ablation: direction, head, layer", ablation, True),
    "patching": Workload("activation patching, layer by position", patching, True),
    "generation_steering": Workload("generation steering, per step", generation_steering, True),
    "generation_patching": Workload(
        "prefill injection, then per-step reads", generation_patching, True
    ),
    "attribution": Workload("direct logit attribution", attribution, False),
    "gradient_patching": Workload(
        "gradient attribution patching", gradient_patching, False, is_local=True
    ),
    "probe": Workload("probe, per token and step", probe, False),
    "cache_everything": Workload("cache everything", cache_everything, False),
    "dictionary_edit": Workload("encode, edit, decode (SAE)", dictionary_edit, True),
}
