"""Caching: keep what every feed-forward part adds, without naming each read.

python examples/caching.py [--engine vllm --stages 2] [--picture norms.png]
"""

from typing import Any

import torch
from loading import once, run

PROMPT = "The Eiffel Tower is located in the city of"


@torch.no_grad()
def cached(model: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a cache of the feed-forward outputs, and the streams, read one by one."""
    with model.trace(PROMPT, **once(model)) as tracer:
        cache = tracer.cache(modules=[layer.mlp for layer in model.model.layers])
        streams = [layer.residual for layer in model.layers].save()
    return cache, streams


def main(model: Any, picture: str = "") -> None:
    cache, streams = cached(model)
    print(f"{len(cache)} modules are in the cache; the last token of {PROMPT!r}")
    print("layer  |stream|  |mlp adds|  share")
    for layer, stream in enumerate(streams):
        # On a local engine an output has a batch dimension in front.
        added = cache[f"model.model.layers.{layer}.mlp"].output[..., -1, :].norm()
        size = stream[-1].norm()
        print(f"{layer:5} {size:9.1f} {added:11.1f} {added / size:6.2f}")
    if picture:
        from nnsight_pp.plots import norm_by_layer

        norms = [stream.norm(dim=-1) for stream in streams]
        prompt = [model.tokenizer.decode(one) for one in model.tokenizer(PROMPT)["input_ids"]]
        norm_by_layer(norms, prompt, title="Norm of the residual stream").savefig(picture)


if __name__ == "__main__":
    run(main, __doc__, draws=True)
