"""What one stage sends to the next, and a few bytes of ours beside it.

Source: vllm 0.32.0 sequence.py:IntermediateTensors; v1/worker/gpu_worker.py:Worker.execute_model
receives them before a step and sends them behind it.
"""

from __future__ import annotations

from typing import Any

import torch

# Under this name: what a model sends has names such as "hidden_states".
_NAME = "nnsight_pp"


def wait_for(activations: Any) -> None:
    """Return when the activations of the stage before are here; at once on the first stage.

    Source: vllm 0.32.0 v1/worker/gpu_worker.py:AsyncIntermediateTensors waits when its tensors are
    first looked at.
    """
    if activations is not None:
        _ = activations.tensors


def take_bytes(activations: Any) -> bytes | None:
    """Take out what `with_bytes` has put into ``activations``, and return it.

    Nothing of it may stay: vLLM knows the names of all tensors that a stage receives.
    """
    found = None if activations is None else activations.tensors.pop(_NAME, None)
    return None if found is None else found.numpy().tobytes()


def with_bytes(activations: Any, data: bytes, *, most_tensors: int) -> Any:
    """Return ``activations`` with ``data`` beside them; without, beside too many tensors."""
    if len(activations.tensors) >= most_tensors:
        return activations
    extra = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return type(activations)({**activations.tensors, _NAME: extra})
