"""What a rank's link sends to other stages: copies of values, and weights as they are."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_pp.core.counted import EditsCounted
from nnsight_pp.core.tree import map_leaves


def constant_of(real: dict[str, torch.nn.Module], name: str) -> torch.Tensor:
    """Return the weight whose location prints as ``name``. Called by the link's threads."""
    path, _, attribute = name.rpartition(".")
    return getattr(real[path], attribute).detach()


def host_copy(value: Any) -> Any:
    """Return ``value`` with every tensor copied to the host, on the calling thread.

    The link's threads send it later, and must not touch a device's stream.
    """
    if type(value) is torch.Tensor and value.is_cpu:  # the usual case; nobody edits the copy
        return value.detach().clone()
    with EditsCounted():
        return map_leaves(
            value,
            lambda leaf: (
                leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
            ),
        )
