"""The ask behind a lazy value, without workers: it answers at once and notes what was pulled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnsight_pp.core.location import Location, Visit
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import OutsideTraceError
from nnsight_pp.parallel.lazy import LazyRemoteTensor, pick


class FakeSource:
    """Answers with ``value``; `pulls` lists the picks of each pull, in order."""

    is_here = False
    sums_alike = casts_copy = True
    shard = None

    def __init__(self, value: Any) -> None:
        self.value = value
        self.pulls: list[tuple[Any, ...]] = []
        self.in_torch: list[bool] = []
        self.echoes: list[Exception] = []
        self.is_over = False

    @property
    def visit(self) -> Visit:
        return Visit(Location("model.layers.5", "output"), 2)

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        if self.is_over:
            raise OutsideTraceError("over")
        self.pulls.append(tuple(picks))
        self.in_torch.append(in_torch)
        return map_leaves(pick(self.value, picks), _crossed)

    def echo(self, error: Exception) -> None:
        self.echoes.append(error)


def _crossed(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def lazy(value: Any) -> tuple[Any, FakeSource]:
    """Return a lazy stand-in for a copy of ``value``, and its source."""
    source = FakeSource(map_leaves(value, _crossed))
    return LazyRemoteTensor(source), source
