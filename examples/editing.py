"""Editing: a model that differs in one place, beside the untouched one.

python examples/editing.py [--engine vllm --stages 2]
"""

from typing import Any

import torch
from loading import once, run

PROMPTS = ("The Eiffel Tower is located in the city of", "The Colosseum is located in the city of")
LAYERS = (21, 23)


def without_attention(model: Any) -> Any:
    """Return the model with two attention layers that add nothing; ``model`` stays as it is."""
    with model.edit() as (_, edited):
        for layer in LAYERS:
            model.layers[layer].attn.output[:] = 0
    return edited


@torch.no_grad()
def answer(model: Any, prompt: str) -> tuple[str, float]:
    """Return the best next token, and its probability."""
    with model.trace(prompt, **once(model)):
        logits = model.logits[0].save()
    chance, token = logits.softmax(-1).max(-1)
    return model.tokenizer.decode(token), float(chance)


def main(model: Any) -> None:
    edited = without_attention(model)
    for name, one in (("untouched", model), ("edited", edited), ("untouched again", model)):
        for prompt in PROMPTS:
            token, chance = answer(one, prompt)
            print(f"{name:15}  {prompt!r}  {token!r} {chance:.3f}")


if __name__ == "__main__":
    run(main, __doc__)
