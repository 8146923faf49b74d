"""Parks inside torch calls on a real two-stage engine: four requests, forty steps each.

On the first stage every one of these calls finds a value of the last stage that is not here yet,
so the worker parks inside torch's own frames while the model runs its forward. Exits 0 when every
value is right, 3 when the parks are refused (the exchange of thread-local state is off).

Usage: park_on_two_stages.py MODEL_FOLDER
"""

from __future__ import annotations

import sys

import torch

from nnsight_pp import VLLM, ParkRefusedError

STEPS = 40
PROMPTS = ["one two three", "the sea is", "a longer prompt about nothing at all", "four"]

model = VLLM(
    sys.argv[1],
    pipeline_parallel_size=2,
    dtype="float32",
    enforce_eager=True,
    max_model_len=128,
    kv_cache_memory_bytes=64 << 20,
)
first, last = model.model.layers[0], list(model.model.layers)[-1]
plain = torch.full((1,), 0.5)
try:
    with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        found = [].save()
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:STEPS]:
                    early = first.mlp.output
                    attention = last.self_attn.output
                    with torch.no_grad():
                        ones = torch.ones_like(attention)
                    normed = last.post_attention_layernorm.output
                    stacked = torch.stack([normed[0][-1], normed[0][-1] + 1])
                    late = last.mlp.output
                    left = plain + late[-1]
                    found.append((number, early, attention, ones, stacked, late, left))
except ParkRefusedError as error:
    print(error)
    model.close()
    sys.exit(3)

assert len(found) == STEPS * len(PROMPTS), len(found)
for number, early, attention, ones, stacked, late, left in found:
    assert early.shape == late.shape == attention.shape, number
    assert torch.equal(ones, torch.ones_like(attention)), number
    assert torch.equal(stacked[1], stacked[0] + 1), number
    assert torch.equal(left, plain + late[-1]), number
    assert late.isfinite().all(), number
assert torch.is_grad_enabled()
assert not torch.is_inference_mode_enabled()
assert all(not any(rank[key] for key in ("tracked", "workers", "pending", "published"))
           for rank in model.statistics())  # fmt: skip
model.close()
print(f"{len(found)} steps were right")
