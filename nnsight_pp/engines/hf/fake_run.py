"""Run a model on values that have a shape and no numbers.

For `model.scan`: torch's fake tensors go through the forward in place of real ones, so shapes and
dtypes come out right, on a model without weights too, and nothing is computed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nnsight_pp.core.tree import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How transformers computes experts: torch fakes the first in bfloat16 only, the second always.
_GROUPED, _BATCHED = "grouped_mm", "batched_mm"


def faked(call: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """Return ``call`` as it runs on fake tensors, which its arguments are turned into.

    Args:
        call: The forward of ``module``, or what calls it.
        module: The model.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # A model's own parameters are real, or on the meta device, and mixed with fake values.
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = map_leaves((args, kwargs), fake)
        with _experts_that_fake(module), mode, torch.no_grad():
            return call(*args, **kwargs)

    return run


@contextlib.contextmanager
def _experts_that_fake(module: Any) -> Iterator[None]:
    """Let the experts of ``module`` be computed in a way whose shapes torch knows.

    Source: torch 2.13 _meta_registrations.py: `meta_grouped_mm`.
    """
    config = getattr(module, "config", None)
    before = getattr(config, "_experts_implementation", None)
    if before != _GROUPED:
        yield
        return
    module.set_experts_implementation(_BATCHED)
    try:
        yield
    finally:
        module.set_experts_implementation(before)
