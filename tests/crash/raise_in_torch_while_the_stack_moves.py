"""Errors of torch in a block, each with a backtrace that torch takes of the worker's stack.

The worker's stack begins in the middle of the model's, which is another one each time that the
worker is resumed: a backtrace must end where the worker begins.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nnsight_pp import NNsight
from nnsight_pp.interleave import shell

if "unprotected" in sys.argv:  # show that it is needed
    shell._at_bottom = lambda: lambda main: main()  # pyright: ignore

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=32
)
module = LlamaForCausalLM(config).eval()
module.generation_config.pad_token_id = 0
model = NNsight(module)
layers = list(model.model.layers)


def run() -> int:
    prompt = torch.ones(1, 5, dtype=torch.long)
    with model.trace(prompt, fn="generate", max_new_tokens=3, eos_token_id=None) as tracer:
        seen = [].save()
        for _ in tracer.iter[:3]:
            for layer in layers:
                value = layer.mlp.output
                for bad in (
                    lambda value=value: value @ torch.ones(5, 5),
                    lambda value=value: value[0][99],
                    lambda value=value: value.view(77),
                ):
                    try:
                        bad()
                    except (RuntimeError, IndexError) as error:
                        seen.append(type(error).__name__)
    return len(seen)


with torch.no_grad():
    # An ended greenlet runs the next block; then each block has one of its own.
    for most_kept in (shell._MOST_KEPT, 0):
        shell._MOST_KEPT = most_kept
        for _ in range(12):
            assert run() == 3 * 4 * 3
print("ok")
