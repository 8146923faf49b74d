"""Activation patching: which layer and position hold what tells two prompts apart.

python examples/activation_patching.py [--engine vllm --stages 2] [--picture patching.png]

The stream of a clean run is put into a corrupted run, one layer and one position at a time. An
effect of 1 is the clean answer restored. Patching a run with its own values gives the noise floor.
"""

from typing import Any

import torch
from loading import once, run, token_id

CLEAN, RIGHT = "The Eiffel Tower is located in the city of", " Paris"
CORRUPTED, WRONG = "The Colosseum is located in the city of", " Rome"
LAYERS = range(0, 30, 4)


@torch.no_grad()
def streams_of(model: Any, prompt: str, right: int, wrong: int) -> tuple[torch.Tensor, float]:
    """Return the streams ``[layers, positions, H]``, and logit(right) - logit(wrong)."""
    with model.trace(prompt, **once(model)):
        streams = torch.stack([model.layers[layer].residual for layer in LAYERS]).save()
        difference = float(model.logits[0, right] - model.logits[0, wrong]).save()
    return streams, difference


@torch.no_grad()
def patched(model: Any, streams: torch.Tensor, right: int, wrong: int) -> torch.Tensor:
    """Return logit(right) - logit(wrong) of the corrupted prompt with one cell of the streams."""
    with model.trace(**once(model)) as tracer:
        difference = {}.save()
        for row, layer in enumerate(LAYERS):
            for position, value in enumerate(streams[row]):
                with tracer.invoke(CORRUPTED):
                    model.layers[layer].residual[position] = value
                    difference[row, position] = model.logits[0, right] - model.logits[0, wrong]
    return torch.stack(list(difference.values())).view(len(LAYERS), -1)


def main(model: Any, picture: str = "") -> None:
    right, wrong = token_id(model, RIGHT), token_id(model, WRONG)
    streams, clean = streams_of(model, CLEAN, right, wrong)
    own, corrupted = streams_of(model, CORRUPTED, right, wrong)
    effect = (patched(model, streams, right, wrong) - corrupted) / (clean - corrupted)
    nothing = (patched(model, own, right, wrong) - corrupted) / (clean - corrupted)
    floor = float(nothing.abs().max())

    print(f"logit(Paris) - logit(Rome) is {clean:+.2f} clean and {corrupted:+.2f} corrupted")
    print(f"the noise floor is {'below' if floor < 1e-4 else 'ABOVE'} 0.0001")
    prompt = [model.tokenizer.decode(token) for token in model.tokenizer(CORRUPTED)["input_ids"]]
    print("layer", *(f"{token.strip()[:7]:>7}" for token in prompt))
    for layer, row in zip(LAYERS, effect, strict=True):
        print(f"{layer:5}", *(f"{value:z7.2f}" for value in row))
    if picture:
        from nnsight_pp.plots import patching_heatmap

        names = {"layers": LAYERS, "metric": "share of the logit difference restored"}
        title = "The Eiffel Tower's stream in the Colosseum's run"
        patching_heatmap(effect, prompt, floor=floor, title=title, **names).savefig(picture)


if __name__ == "__main__":
    run(main, __doc__, draws=True)
