"""Per head: which attention heads decide between two names.

python examples/per_head.py [--engine vllm --stages 2]

Who gets the drink? The one who was named once. One head at a time is silenced, at the last
token, and the head that matters most is asked where it looks.
"""

from typing import Any

import torch
from loading import once, run, token_id

from nnsight_pp import attention_pattern

PROMPT = "When Mary and John went to the store, John gave a drink to"
ANSWER, OTHER = " Mary", " John"
LAYERS = range(12, 30)
SHOWN = 6


@torch.no_grad()
def silenced(model: Any, right: int, wrong: int) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
    """Return logit(right) - logit(wrong), untouched and without each head."""
    heads = model.config.num_attention_heads
    with model.trace(**once(model)) as tracer:
        difference = {}.save()
        with tracer.invoke(PROMPT):
            untouched = (model.logits[0, right] - model.logits[0, wrong]).save()
        for layer in LAYERS:
            for head in range(heads):
                with tracer.invoke(PROMPT):
                    model.layers[layer].attn.z[-1, head] = 0
                    difference[layer, head] = model.logits[0, right] - model.logits[0, wrong]
    return untouched, difference


@torch.no_grad()
def looked_at(model: Any, layer: int) -> torch.Tensor:
    """Return how much each head of the layer attends to each token from the last, [heads, T]."""
    with model.trace(PROMPT, **once(model)):
        pattern = attention_pattern(model.layers[layer], rows=-1).save()
    return pattern


def main(model: Any) -> None:
    right, wrong = token_id(model, ANSWER), token_id(model, OTHER)
    untouched, difference = silenced(model, right, wrong)
    change = {head: float(value - untouched) for head, value in difference.items()}
    print(f"{PROMPT!r}: logit({ANSWER!r}) - logit({OTHER!r}) = {untouched:.2f}")
    print(f"of {len(change)} heads, silencing these changes it most")
    largest = sorted(change, key=lambda one: -abs(change[one]))[:SHOWN]
    for layer, head in largest:
        print(f"  layer {layer:2} head {head}  {change[layer, head]:+6.2f}")
    layer, head = largest[0]
    share, place = looked_at(model, layer)[head].topk(3)
    prompt = [model.tokenizer.decode(one) for one in model.tokenizer(PROMPT)["input_ids"]]
    print(f"head {head} of layer {layer} looks at")
    for much, position in zip(share, place, strict=True):
        print(f"  {much:.3f}  token {int(position):2}  {prompt[position]!r}")


if __name__ == "__main__":
    run(main, __doc__)
