"""What the client sends of one block, and what it refuses before it does."""

from __future__ import annotations

import torch

from nnsight_pp.core.block import Block
from nnsight_pp.core.saved import SavedSet
from nnsight_pp.engines.vllm.message import message_of
from nnsight_pp.trace.names import Names
from nnsight_pp.trace.tracer import Invocation


def invocation(text: str) -> Invocation:
    block = Block("user.py", 3, text, "run")
    return Invocation((), {}, block, Names(({"x": [1], "y": 2},)), SavedSet())


def test_the_names_and_settings_of_the_moment_travel():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            message = message_of("t", invocation("    z = x\n"), "")
    finally:
        torch.set_default_dtype(torch.float32)
    around = message.surroundings
    assert around is not None
    assert (message.names, around.dtype, around.grad_enabled) == ({"x": [1]}, torch.float64, False)
