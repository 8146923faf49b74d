"""The ranks that split each layer of a stage, and what they say to each other.

Source: vllm 0.32.0 distributed/device_communicators/cpu_communicator.py: on CPUs the all-reduce
works in place, and the shared memory takes three floating dtypes only; other data go through it as
what has the same bytes.

There a rank that waits spins. Where ranks share a core, the one that is waited for runs only when
the spinning one's turn is over, some milliseconds: such ranks gather over gloo, where they sleep.
"""

from __future__ import annotations

import datetime
import os
from typing import Any, final

import torch

from nnsight_pp.engines.vllm import compat

_SHARED_MEMORY_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# How long a rank whose model has raised waits for the others to say the same.
_FAILURE_BOUND_S = 10


@final
class TensorGroup:
    """The ranks of one stage, by vLLM's own collectives. Each method is one."""

    def __init__(self) -> None:
        self._group = compat.tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size
        self.device: torch.device = self._group.device
        cores = os.cpu_count() or 1
        self._is_crowded = compat.IS_CPU and torch.distributed.get_world_size() > cores

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``tensor``, by rank."""
        if self._is_crowded and tensor.is_cpu:
            whole = tensor.contiguous()
            parts = [torch.empty_like(whole) for _ in range(self.size)]
            torch.distributed.all_gather(parts, whole, group=self._group.cpu_group)
            return parts
        sent = tensor.contiguous().view(1, -1)
        if not compat.IS_CPU or tensor.dtype in _SHARED_MEMORY_TYPES:
            rows = self._group.all_gather(sent, 0)
        elif tensor.nbytes % 4 == 0:
            rows = self._group.all_gather(sent.view(torch.float32), 0).view(tensor.dtype)
        else:
            sent = torch.nn.functional.pad(sent.view(torch.uint8), (0, 4 - tensor.nbytes % 4))
            rows = self._group.all_gather(sent.view(torch.float32), 0).view(torch.uint8)
            rows = rows[:, : tensor.nbytes].contiguous().view(tensor.dtype)
        return list(rows.view(self.size, *tensor.shape).unbind())

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``tensor``, in new memory."""
        return self._group.all_reduce(tensor.clone())

    def have_all_failed(self, text: str) -> bool:
        """Whether every rank comes here with the same ``text``, within a bound.

        Goes past vLLM's own collectives, in one of which a rank may be stuck.
        """
        bound = datetime.timedelta(seconds=_FAILURE_BOUND_S)
        try:
            torch.distributed.monitored_barrier(self._group.cpu_group, bound)
        except RuntimeError:
            return False
        texts: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(texts, text, group=self._group.cpu_group)
        return len(set(texts)) == 1
