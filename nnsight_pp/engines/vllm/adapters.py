"""Repair how vLLM's kernels for the CPU treat requests without a LoRA adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.lora.ops.torch_ops.lora_ops as kernels
import vllm.lora.punica_wrapper.punica_cpu as wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

# Each adds, row by row, what an adapter's second matrix gives.
_EXPANDING = ("bgmv_expand", "bgmv_expand_slice")


def leave_other_rows_alone() -> None:
    """Let an adapter change the rows of its own requests only. Once per process, before the load.

    A row without adapter has the index -1, with which vLLM's kernels for the CPU pick the *last*
    adapter: beside a request with an adapter, one without it got that adapter's values, in plain
    vLLM too.

    Source: vllm 0.32.0 lora/ops/torch_ops/lora_ops.py: `lora_b_weights[lora_indices_tensor]`;
    lora/punica_wrapper/utils.py:compute_meta asks only whether the *whole* step has no adapter. The
    kernels for CUDA leave such rows out (lora/ops/triton_ops/lora_expand_op.py: `lora_id == -1`).
    """
    for name in _EXPANDING:
        own = getattr(kernels, name)
        if getattr(own, "leaves_rows", False):
            continue
        repaired = _without_rows(own)
        # The kernels for runs of tokens call these by their module's name, the wrapper by its own.
        for module in (kernels, wrapper):
            setattr(module, name, repaired)


def _without_rows(expand: Callable[..., None]) -> Callable[..., None]:
    def expand_own_rows(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        # What the first matrix gave such a row is of the last adapter too, so it is no number
        # to multiply by zero: it may have overflowed.
        inputs = torch.where((indices >= 0).unsqueeze(-1), inputs, torch.zeros_like(inputs))
        expand(inputs, weights, output, indices, *rest, **named)

    expand_own_rows.leaves_rows = True  # type: ignore[attr-defined]
    return expand_own_rows
