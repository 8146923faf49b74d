"""Logit lens: what each layer would answer, had the model ended there.

python examples/logit_lens.py [--engine vllm --stages 2] [--picture lens.png]
"""

from typing import Any

import torch
from loading import once, run, token_id, unembed

PROMPT = "The Eiffel Tower is located in the city of"
ANSWER = " Paris"


@torch.no_grad()
def lens_of(model: Any, answer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each layer's best token at each position, its probability, and the answer's."""
    with model.trace(PROMPT, **once(model)):
        streams = [layer.residual for layer in model.layers]
        logits = [unembed(model, stream) for stream in streams]
        token = [one.argmax(-1) for one in logits].save()
        best = [one.amax(-1) for one in logits].save()
        own = [one[:, answer] for one in logits].save()
        whole = [one.logsumexp(-1) for one in logits].save()
    token, best, own, whole = (torch.stack(one) for one in (token, best, own, whole))
    return token, (best - whole).exp(), (own - whole).exp()


def main(model: Any, picture: str = "") -> None:
    token, sure, answer = lens_of(model, token_id(model, ANSWER))
    tokens = [[model.tokenizer.decode(one) for one in row] for row in token]

    print(f"{PROMPT!r}: what each layer would say next")
    print("layer  best token    p(best)   p(' Paris')")
    for layer, row in enumerate(tokens):
        print(f"{layer:5}  {row[-1]!r:12} {sure[layer, -1]:8.3f} {answer[layer, -1]:12.4f}")
    if picture:
        from nnsight_pp.plots import logit_lens_grid

        prompt = [model.tokenizer.decode(one) for one in model.tokenizer(PROMPT)["input_ids"]]
        logit_lens_grid(prompt, tokens, sure, title="Logit lens").savefig(picture)


if __name__ == "__main__":
    run(main, __doc__, draws=True)
