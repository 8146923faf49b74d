"""Attribution: which parts of the model speak for an answer.

python examples/attribution.py [--engine vllm --stages 2]

Direct: what each part adds to the last stream, seen by the head. Exact, one run, on both engines.
By gradient: what patching each stream would do, estimated from one backward. Local engine only.
"""

from typing import Any

import torch
from loading import once, run, token_id

from nnsight_pp import NotSupportedError

CLEAN, ANSWER = "The Eiffel Tower is located in the city of", " Paris"
CORRUPTED, OTHER = "The Colosseum is located in the city of", " Rome"
LAYERS = range(2, 30, 9)
SHOWN = 6


@torch.no_grad()
def direct(model: Any, right: int, wrong: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what each part adds to logit(right) - logit(wrong), and that difference."""
    tiny = model.config.rms_norm_eps
    with model.trace(CLEAN, **once(model)):
        added = {}.save()
        parts = {"embedding": model.embeddings[-1]}
        for index, layer in enumerate(model.layers):
            parts[f"attn of {index}"] = layer.attn.output[-1]
            parts[f"mlp of {index}"] = layer.mlp.output[-1]
        # The last norm divides by one number, the same for all parts: the division is linear.
        size = (layer.residual[-1].pow(2).mean() + tiny).sqrt()
        words = model.model.embed_tokens.weight
        seen = (words[right] - words[wrong]) * model.model.norm.weight
        for name, part in parts.items():
            added[name] = part @ seen / size
        logits = model.logits[0].save()
    return added, logits[right] - logits[wrong]


def by_gradient(model: Any, right: int, wrong: int) -> list[torch.Tensor]:
    """Return, for each layer and position, the estimated effect of patching its stream."""
    with model.trace(CLEAN, **once(model)):
        clean = [model.layers[layer].residual for layer in LAYERS].save()
    with model.trace(CORRUPTED, **once(model)):
        corrupted = [model.layers[layer].residual for layer in LAYERS]
        difference = model.logits[0, right] - model.logits[0, wrong]
        with difference.backward():
            slopes = [stream.grad for stream in reversed(corrupted)][::-1]
        rows = zip(clean, corrupted, slopes, strict=True)
        estimate = [((there - here) * slope).sum(-1) for there, here, slope in rows].save()
    return estimate


def main(model: Any) -> None:
    right, wrong = token_id(model, ANSWER), token_id(model, OTHER)
    added, whole = direct(model, right, wrong)
    print(f"logit({ANSWER!r}) - logit({OTHER!r}) = {whole:.3f} after {CLEAN!r}")
    print(f"the {len(added)} parts add up to {sum(added.values()):.3f}; the largest:")
    for name in sorted(added, key=lambda name: -abs(added[name]))[:SHOWN]:
        print(f"  {name:12} {added[name]:+7.3f}")
    try:
        estimate = by_gradient(model, right, wrong)
    except NotSupportedError as refused:
        print("no gradients here:", str(refused).splitlines()[0])
        return
    print(f"patching {CLEAN!r} into {CORRUPTED!r}, estimated by gradient, in logits")
    prompt = [model.tokenizer.decode(token) for token in model.tokenizer(CORRUPTED)["input_ids"]]
    print("layer", *(f"{token.strip()[:7]:>7}" for token in prompt))
    for layer, row in zip(LAYERS, estimate, strict=True):
        print(f"{layer:5}", *(f"{value:z7.2f}" for value in row))


if __name__ == "__main__":
    run(main, __doc__)
