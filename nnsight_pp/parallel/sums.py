"""Sums by which tensors are compared between ranks: a few numbers for any size."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Sums of a tensor that are compared: of the elements, of their sizes, of every seventh.
NUM_SUMS = 3
_STRIDE = 7
# What rounding may differ between ranks, as a share of the sum of sizes.
_ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-6}
_COARSE_ROUNDING = 1e-3


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums by which ``tensor`` is compared between ranks.

    Cost: two passes over it.
    """
    with torch.inference_mode(False), torch.no_grad():
        flat = tensor.detach()
        if not flat.is_floating_point() or flat.itemsize == 1:
            flat = flat.to(torch.float64)
        every = flat.flatten()[::_STRIDE]
        return torch.stack(
            [
                flat.sum(dtype=torch.float64),
                torch.linalg.vector_norm(flat, 1, dtype=torch.float64),
                every.sum(dtype=torch.float64),
            ]
        )


def agree_at(rows: torch.Tensor, place: int, dtype: torch.dtype) -> bool:
    """Whether the sums at ``place`` are the same in every row, up to rounding."""
    sums = rows[:, place * NUM_SUMS : (place + 1) * NUM_SUMS].nan_to_num(nan=-1e300)
    rounding = _ROUNDING.get(dtype, _COARSE_ROUNDING)
    if not dtype.is_floating_point:
        rounding = 0.0
    return bool(((sums - sums[0]).abs() <= rounding * sums[:, 1].abs().max()).all())


class Sums(NamedTuple):
    """By what a tensor is compared between ranks, and of which dtype it is."""

    sums: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sums:
        """Return those of ``tensor`` as it is now."""
        return cls(sums_of(tensor), tensor.dtype)
