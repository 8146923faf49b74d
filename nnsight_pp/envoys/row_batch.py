"""Several invokes on a plain module: their inputs joined along the first dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.rows import WHOLE, BatchCut, Rows
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.protocols import Cut
    from nnsight_pp.trace.tracer import Invocation

Given = tuple[tuple[Any, ...], dict[str, Any]]


def alone(invocations: Sequence[Invocation]) -> tuple[Given, list[Cut]] | None:
    """Return what `joined` does, for one invocation that has inputs; None for any others."""
    one = invocations[0]
    if len(invocations) > 1 or not (one.inputs or one.kwargs):
        return None
    return (one.inputs, one.kwargs), [WHOLE]


def joined(
    invocations: Sequence[Invocation],
    size_of: Callable[..., int],
    join: Callable[[list[Given], Any], Given],
    call: Any,
) -> tuple[Given, list[Cut]]:
    """Join the inputs of ``invocations``: return the one call's arguments, and a cut for each.

    Args:
        invocations: An invoke without rows of its own sees the whole batch; the options it gives
            go to the call.
        size_of: Tells how many rows the inputs of one invoke are, 0 for options only.
        join: Makes one call's arguments of several.
        call: What will be called, for ``join``.

    Raises:
        ConfigurationError: None has an input, or they cannot be joined.
    """
    given = [one for one in invocations if one.inputs or one.kwargs]
    if not given:
        raise ConfigurationError(
            explain(
                "The trace needs an input, and none of its invokes has one.",
                why="An invoke without an input sees the batch of the others.",
                todo="Give at least one `tracer.invoke(...)` an input.",
            )
        )
    if len(given) == 1:
        one = given[0]
        return (one.inputs, one.kwargs), [WHOLE] * len(invocations)
    sizes = [
        size_of(*one.inputs, **one.kwargs) if one.inputs or one.kwargs else 0 for one in invocations
    ]
    rows = [one for one, size in zip(invocations, sizes, strict=True) if size]
    args, kwargs = join([(one.inputs, one.kwargs) for one in rows], call)
    for one, size in zip(invocations, sizes, strict=True):
        if not size:
            kwargs = {**kwargs, **one.kwargs}
    cuts: list[Cut] = []
    start, total = 0, sum(sizes)
    for size in sizes:
        alone = not size or len(rows) == 1
        cuts.append(WHOLE if alone else BatchCut(Rows(start, size, total)))
        start += size
    return (args, kwargs), cuts


def num_rows(*inputs: Any, **kwargs: Any) -> int:
    """Return the first dimension of the first tensor given."""
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    raise ConfigurationError(
        explain(
            "An invoke has no tensor input.",
            why="Batching several invokes joins their tensors along the first dimension.",
            todo="Give each invoke a tensor with a batch dimension, or override `_batch`.",
        )
    )


def join_tensors(given: list[Given], call: Any) -> Given:
    """Join the tensors along the first dimension; everything else must be equal."""
    args, kwargs = given[0]
    if any(len(one) != len(args) or set(named) != set(kwargs) for one, named in given):
        raise ConfigurationError("The invokes of one trace must take the same arguments.")
    return (
        tuple(_joined([one[index] for one, _ in given]) for index in range(len(args))),
        {name: _joined([named[name] for _, named in given]) for name in kwargs},
    )


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        shapes = {tuple(value.shape[1:]) for value in values}
        if len(shapes) > 1:
            raise ConfigurationError(
                f"Batching invokes needs equal shapes beyond the first dimension, got {shapes}."
            )
        return torch.cat(values)
    if any(value is not values[0] and value != values[0] for value in values):
        raise ConfigurationError(f"The invokes give different options: {values}.")
    return values[0]


def on_device_of(module: torch.nn.Module, given: Given) -> Given:
    """Return ``given`` with its tensors on the device of the module's first parameter."""
    first = _first_parameter(module)
    if first is None:
        return given
    device, (args, kwargs) = first.device, given
    if all(type(one) is torch.Tensor and one.device == device for one in args) and not kwargs:
        return given
    return map_leaves(
        given, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
    )


def _first_parameter(module: torch.nn.Module) -> torch.nn.Parameter | None:
    """Return what ``next(module.parameters())`` gives, in a tenth of its time."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        if child is not None and (child._parameters or child._modules):
            found = _first_parameter(child)
            if found is not None:
                return found
    return None
