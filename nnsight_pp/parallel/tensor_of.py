"""`torch.tensor([value.norm(), other.sum()])` where some of these are another stage's values.

torch takes a list of tensors with one number each. Its C++ takes a lazy value for a sequence, whose
length it asks for, and that of a single number is a `TypeError`. Then the values are brought.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import leaves
from nnsight_pp.parallel.pulled import real

if TYPE_CHECKING:
    from collections.abc import Callable


def teach_tensor() -> None:
    """Let `torch.tensor` and `torch.as_tensor` of this process take lists of lazy values."""
    for name in ("tensor", "as_tensor"):
        function = getattr(torch, name)
        if not hasattr(function, "__wrapped__"):
            setattr(torch, name, taking_lazy(function))


def taking_lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which makes a tensor of data, so that it takes lazy values in it.

    Costs nothing where there are none: they are looked for when it has failed.
    """

    @wraps(function)
    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(data, *args, **kwargs)
        except TypeError:
            if not any(issubclass(type(leaf), RemoteValue) for leaf in leaves(data)):
                raise
        return function(real(data, in_torch=False), *args, **kwargs)

    return made
