"""Generation loop: watch every step, and take the other road where the model hesitates.

python examples/generation_loop.py [--engine vllm --stages 2]
"""

from typing import Any

import torch
from loading import greedy, run

PROMPT = "The best thing about the sea is"
TOKENS = 10


@torch.no_grad()
def told(model: Any, turn_at: float) -> list[dict[str, Any]]:
    """Return what each step saw; at the first one with more doubt, take the second token."""
    with model.trace(PROMPT, **greedy(model, TOKENS)) as tracer:
        steps = [].save()
        has_turned = False
        for _ in tracer.iter[:TOKENS]:
            logits = model.logits
            chance, token = logits[0].softmax(-1).topk(2)
            doubt = float(-(logits[0].softmax(-1) * logits[0].log_softmax(-1)).sum())
            turns = not has_turned and doubt > turn_at
            if turns:
                logits[0, token[0]] = -1e4  # the step samples from what stands here now
                has_turned = True
            taken = int(token[1] if turns else token[0])
            steps.append({"doubt": doubt, "chance": float(chance[int(turns)]), "token": taken})
    return steps


def main(model: Any) -> None:
    print(PROMPT)
    for turn_at in (99.0, 3.0):
        steps = told(model, turn_at)
        print(f"\nturning at the first doubt above {turn_at} nats")
        for number, step in enumerate(steps):
            token = model.tokenizer.decode(step["token"])
            print(f"{number:4}  doubt {step['doubt']:5.2f}  p {step['chance']:5.3f}  {token!r}")
        print("  ->", repr(model.tokenizer.decode([step["token"] for step in steps])))


if __name__ == "__main__":
    run(main, __doc__)
