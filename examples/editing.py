"""Editing: an intervention that stays until it is taken away.

python examples/editing.py [--engine vllm --stages 2]
"""

from typing import Any

import torch
from loading import once, run

PROMPTS = ("The Eiffel Tower is located in the city of", "The Colosseum is located in the city of")
LAYERS = (21, 23)


@torch.no_grad()
def answer(model: Any, prompt: str) -> tuple[str, float]:
    """Return the best next token, and its probability."""
    with model.trace(prompt, **once(model)):
        logits = model.logits[0].save()
    chance, token = logits.softmax(-1).max(-1)
    return model.tokenizer.decode(token), float(chance)


def silence(model: Any) -> None:
    """Let two attention layers add nothing, in every later trace."""
    with model.edit(inplace=True):
        for layer in LAYERS:
            model.layers[layer].attn.output[:] = 0


def tell(name: str, model: Any) -> None:
    for prompt in PROMPTS:
        token, chance = answer(model, prompt)
        print(f"{name:15}  {prompt!r}  {token!r} {chance:.3f}")


def main(model: Any) -> None:
    tell("untouched", model)
    silence(model)
    tell("edited", model)
    model.clear_edits()
    tell("untouched again", model)


if __name__ == "__main__":
    run(main, __doc__)
