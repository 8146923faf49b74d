"""Weights that vLLM's CPU backend has packed: what they hold, and the same packing of others.

The weight of a linear layer is packed into a form of its own and dropped; that of an embedding is
kept beside its packed form; that of experts is packed where it lies. All of it can be undone:

* a linear layer times the identity is its weight, exactly: each sum is one number and zeros;
* packing experts moves numbers about, so packing their places tells where each has gone.

A packed form is replaced where it lies: compiled code holds on to it.

Source: vllm 0.32.0 model_executor/layers/utils.py:dispatch_cpu_unquantized_gemm;
fused_moe/experts/cpu_moe.py:CPUUnquantizedExperts.process_weights_after_loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

if TYPE_CHECKING:
    from collections.abc import Callable

# How many rows of the identity go through a layer at once.
_ROWS = 1024
# Every dtype of weights holds the whole numbers below it.
_DIGITS = 128


class PackingError(ValueError):
    """A packed weight that cannot be told, or made anew."""


def experts_of(layer: torch.nn.Module) -> Any:
    """Return what packs the weights of a layer of experts, or None for another layer."""
    method: Any = getattr(layer, "quant_method", None)
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    is_packing = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
    return experts if is_packing else None


def unpacked(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """Return this rank's part of the parameter ``name`` as it was loaded. Read it, never write it.

    Raises:
        PackingError: It cannot be told.

    Cost: for a linear layer that was packed, a product of its weight with the identity.
    """
    weight: torch.Tensor = getattr(layer, name).detach()
    experts = experts_of(layer)
    if experts is not None and name in ("w13_weight", "w2_weight"):
        return _without_padding(experts, name, _experts_unpacked(experts, weight))
    if name == "weight" and not weight.numel() and hasattr(layer, "cpu_linear"):
        return _times_identity(layer, weight.dtype)
    return weight


def replacement(layer: torch.nn.Module, name: str, part: torch.Tensor) -> Callable[[], None]:
    """Return what puts ``part`` into the place of the parameter ``name``, packed as it is.

    All that may fail has been done when this returns.

    Raises:
        PackingError: Its packed form cannot be made anew.
    """
    parameter: torch.Tensor = getattr(layer, name)
    experts = experts_of(layer)
    if experts is not None and name in ("w13_weight", "w2_weight"):
        part = cpu_prepack_moe_weight(_with_padding(experts, name, part), experts.isa)
    has_own = parameter.numel() > 0 or part.numel() == 0
    if has_own and parameter.shape != part.shape:
        raise PackingError(f"shape {list(part.shape)} does not fit into {list(parameter.shape)}")
    fresh = part.to(parameter.dtype).contiguous()
    swaps = _swaps(layer, fresh) if name == "weight" else []

    def put() -> None:
        if has_own:
            parameter.data.copy_(fresh)
        for swap in swaps:
            swap()

    return put


def _times_identity(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    width = getattr(layer, "input_size_per_partition", layer.input_size)
    columns = []
    for start in range(0, width, _ROWS):
        rows = torch.zeros(min(_ROWS, width - start), width, dtype=dtype)
        rows.diagonal(start).fill_(1)
        columns.append(layer.cpu_linear(rows, layer.weight, None))
    weight = torch.cat(columns).t().contiguous()
    # An infinity times the zeros of the identity is no number.
    if not bool(weight.isfinite().all()):
        raise PackingError("a packed weight with infinities or NaNs cannot be read back")
    return weight


def _swaps(layer: Any, part: torch.Tensor) -> list[Callable[[], None]]:
    """Return what puts the packed form of ``part`` into the place of the layer's, if it has one."""
    old = getattr(layer, "cpu_linear", None)
    if getattr(old, "__closure__", None) is None:
        return []  # it takes the weight itself
    scratch: Any = torch.nn.Module()
    scratch.weight = torch.nn.Parameter(part.clone(), requires_grad=False)
    layer.quant_method.process_weights_after_loading(scratch)
    new = scratch.cpu_linear
    if new.__code__ is not old.__code__ or new.__defaults__ != old.__defaults__:
        raise PackingError("vLLM packs the weight in another way now")
    return [
        swap
        for mine, other in zip(old.__closure__, new.__closure__, strict=True)
        for swap in _swap(mine.cell_contents, other.cell_contents)
    ]


def _swap(old: Any, new: Any) -> list[Callable[[], None]]:
    """Return what makes ``old``, which the packed layer uses, hold what ``new`` does."""
    if isinstance(old, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype:
        return [lambda: old.copy_(new) and None]
    if hasattr(old, "handler_tensor"):  # vllm 0.32.0 _custom_ops.py:CPUDNNLGEMMHandler

        def exchange() -> None:
            # Each releases in the end what it points at.
            mine = old.handler_tensor.clone()
            old.handler_tensor.copy_(new.handler_tensor)
            new.handler_tensor.copy_(mine)

        return [exchange]
    if type(old) is int and old == new:
        return []
    raise PackingError(f"a {type(old).__name__} of its packed form is not known")


def _experts_unpacked(experts: Any, packed: torch.Tensor) -> torch.Tensor:
    num_experts, *shape = packed.shape
    order = _order(tuple(shape), packed.dtype, experts.isa)
    plain = torch.empty_like(packed)
    plain.view(num_experts, -1)[:, order] = packed.reshape(num_experts, -1)
    if not torch.equal(cpu_prepack_moe_weight(plain, experts.isa), packed):
        raise PackingError("the packed weights of the experts cannot be told")
    return plain


def _order(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Return from where each number of one packed expert of ``shape`` comes."""
    places = torch.arange(torch.Size(shape).numel())
    order, unit = torch.zeros_like(places), 1
    while unit <= len(places):
        digits = (places // unit % _DIGITS).to(dtype).view(1, *shape)
        order += cpu_prepack_moe_weight(digits, isa).flatten().long() * unit
        unit *= _DIGITS
    return order


def _sizes(experts: Any) -> tuple[int, int]:
    """Return how many columns each expert has on this rank, without padding and with it."""
    config = experts.moe_config
    return config.intermediate_size_per_partition, experts._padded_intermediate_size(config)


def _without_padding(experts: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    size, padded = _sizes(experts)
    if size == padded:
        return weight
    if name == "w2_weight":
        return weight[:, :, :size].contiguous()
    return torch.cat([weight[:, :size], weight[:, padded : padded + size]], 1)


def _with_padding(experts: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    size, padded = _sizes(experts)
    num_experts, rows, columns = weight.shape
    if size == padded:
        return weight.contiguous()
    if name == "w2_weight":
        fresh = weight.new_zeros(num_experts, rows, padded)
        fresh[:, :, :size] = weight
        return fresh
    fresh = weight.new_zeros(num_experts, 2 * padded, columns)
    fresh[:, :size], fresh[:, padded : padded + size] = weight[:, :size], weight[:, size:]
    return fresh
