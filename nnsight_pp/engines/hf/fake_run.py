"""Run a model on values that have a shape and no numbers.

For `model.scan`: torch's fake tensors go through the forward in place of real ones, so shapes and
dtypes come out right, on a model without weights too, and nothing is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nnsight_pp.core.tree import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def faked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` as it runs on fake tensors, which its arguments are turned into."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # A model's own parameters are real, or on the meta device, and mixed with fake values.
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = map_leaves((args, kwargs), fake)
        with mode, torch.no_grad():
            return call(*args, **kwargs)

    return run
