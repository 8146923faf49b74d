"""Ablation: what the answer loses when one part of one layer adds nothing.

python examples/ablation.py [--engine vllm --stages 2]
"""

from typing import Any

import torch
from loading import once, run, token_id

PROMPT = "The Eiffel Tower is located in the city of"
ANSWER = " Paris"
SHOWN = 8


@torch.no_grad()
def ablated(model: Any) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
    """Return the untouched logits, and those without each part of each layer."""
    with model.trace(**once(model)) as tracer:
        logits = {}.save()
        with tracer.invoke(PROMPT):
            untouched = model.logits[0].save()
        for index, layer in enumerate(model.layers):
            with tracer.invoke(PROMPT):
                layer.attn.output[:] = 0
                logits[index, "attn"] = model.logits[0]
            with tracer.invoke(PROMPT):
                layer.mlp.output[:] = 0
                logits[index, "mlp"] = model.logits[0]
    return untouched, logits


def main(model: Any) -> None:
    answer = token_id(model, ANSWER)
    untouched, logits = ablated(model)
    known = untouched.log_softmax(-1)[answer]
    lost = {part: known - row.log_softmax(-1)[answer] for part, row in logits.items()}
    print(f"p({ANSWER!r}) = {known.exp():.3f} after {PROMPT!r}")
    print("without     p(' Paris')  lost (nats)  best token")
    for index, part in sorted(lost, key=lost.__getitem__, reverse=True)[:SHOWN]:
        row = logits[index, part]
        best = model.tokenizer.decode(row.argmax())
        print(
            f"{part:>4} of {index:2} {row.softmax(-1)[answer]:12.4f} "
            f"{lost[index, part]:12.2f}  {best!r}"
        )


if __name__ == "__main__":
    run(main, __doc__)
