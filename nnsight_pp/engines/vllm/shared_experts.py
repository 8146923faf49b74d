"""Experts that every token goes to, in the steps in which a block may look at them.

Source: vllm 0.32.0 fused_moe/runner/shared_experts.py: on CUDA a shared expert runs on a stream of
its own beside the routed ones when a step has few tokens, and what it gives is kept on its holder
until they are done.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


def shared_experts(model: torch.nn.Module) -> list[SharedExperts]:
    """Return those of ``model``."""
    return [one for one in model.modules() if isinstance(one, SharedExperts)]


@contextmanager
def run_in_turn(experts: Sequence[SharedExperts]) -> Iterator[None]:
    """Let ``experts`` run on the stream of the step.

    A block that was handed a value on another stream would leave tensors there, whose memory is
    given to the next of that stream while the step still reads them.
    """
    streams = [one._stream for one in experts]
    for one in experts:
        one._stream = None
    try:
        yield
    finally:
        for one, stream in zip(experts, streams, strict=True):
            one._stream = stream


def forget_outputs(experts: Sequence[SharedExperts]) -> None:
    """Drop what a forward that failed has left behind: the next one insists that there is none."""
    for one in experts:
        one._output = [None] * len(one._output)
