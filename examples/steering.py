"""Steering: push the stream along a direction that was read from contrasting prompts.

python examples/steering.py [--engine vllm --stages 2]
"""

from typing import Any

import torch
from loading import greedy, once, run, token_id

LAYER = 12
HAPPY = (
    "I love this so much, it is wonderful",
    "What a beautiful, happy and great day",
    "This is excellent, the best I have seen",
)
SAD = (
    "I hate this so much, it is terrible",
    "What an ugly, sad and awful day",
    "This is dreadful, the worst I have seen",
)
PROMPT = "The food at this restaurant is"
TOKENS = 8


@torch.no_grad()
def direction(model: Any) -> torch.Tensor:
    """Return the mean difference of the streams behind the last token of the prompts."""
    with model.trace(**once(model)) as tracer:
        ends = [].save()
        for prompt in (*HAPPY, *SAD):
            with tracer.invoke(prompt):
                ends.append(model.layers[LAYER].residual[-1])
    happy, sad = torch.stack(ends).chunk(2)
    return happy.mean(0) - sad.mean(0)


@torch.no_grad()
def steered(model: Any, push: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return the first step's logits, and the continuation, with ``push`` added at every step."""
    with model.trace(PROMPT, **greedy(model, TOKENS)) as tracer:
        logits = [].save()
        for _ in tracer.iter[:TOKENS]:
            model.layers[LAYER].residual[:] += push
            logits.append(model.logits[0])
    return logits[0], model.tokenizer.decode([int(row.argmax()) for row in logits])


def main(model: Any) -> None:
    happy = direction(model)
    good, bad = token_id(model, " good"), token_id(model, " bad")
    print(f"happy minus sad at layer {LAYER}: a direction of length {happy.norm():.1f}")
    print("push  logit(good) - logit(bad)  continuation")
    for strength in (-2, -1, 0, 1, 2):
        logits, text = steered(model, strength * happy)
        print(f"{strength:+4}  {logits[good] - logits[bad]:24.2f}  {text!r}")


if __name__ == "__main__":
    run(main, __doc__)
