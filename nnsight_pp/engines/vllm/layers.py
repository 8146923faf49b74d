"""What the layers of a vLLM model hold of a value on each rank of a tensor-parallel group.

Three sources of rules (`parallel.parts`), and one check:

* the class of a layer, compared with the same layer of the unsplit model on the meta device;
* memory: in the trial forward an activation's input is the output of `gate_up_proj`, and `q` is a
  view of the output of `qkv_proj`, so they are split alike;
* a rotary embedding gives back `q` and `k` as it takes them, and attention tells its heads.

A value for which none of them knows a rule must be the same on every rank, which is checked when a
block reads it (`parallel.joined`). So a class that is unknown here is refused, never misread.

Source: vllm 0.32.0 model_executor/layers: linear.py, vocab_parallel_embedding.py,
fused_moe/runner/moe_runner.py:_maybe_reduce_final_output, attention/attention.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from nnsight_pp.core.location import Location
from nnsight_pp.core.tree import leaves
from nnsight_pp.envoys.serve_point import module_paths
from nnsight_pp.parallel.parts import (
    ColumnGroup,
    Columns,
    Rule,
    Summand,
    columns_of,
    split_evenly,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Rules = dict[Location, tuple[Rule | None, ...]]
# These use weights as they were loaded, but for what a CPU packs of them.
PLAIN_METHODS = (linear.UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_PLAIN_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
# Subclasses may split in another way, so classes are compared by identity.
_EMBEDDINGS = (VocabParallelEmbedding, ParallelLMHead)


class _Region(NamedTuple):
    """Where a tensor of one token lies in memory."""

    storage: int
    start: int
    stop: int


@final
class Noted:
    """What a trial forward of one token serves on this rank, kept alive until it is looked at."""

    def __init__(self) -> None:
        self.order: list[Location] = []
        self._values: dict[Location, list[Any]] = {}

    def serve(self, location: Location, value: Any) -> Any:
        """Note ``value``; stands as `Gate.serve` during the trial."""
        self.order.append(location)
        self._values[location] = list(leaves(value))
        return value

    def leaves_at(self, location: Location) -> list[Any]:
        """Return the leaves of the value at ``location``; none where it was not served."""
        return self._values.get(location, [])

    def regions(self) -> Iterable[tuple[Location, int, _Region]]:
        """Yield location, leaf and region of each tensor that lies in one piece."""
        for location, found in self._values.items():
            for index, leaf in enumerate(found):
                if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.is_contiguous():
                    start = leaf.storage_offset()
                    place = leaf.untyped_storage().data_ptr()
                    yield location, index, _Region(place, start, start + leaf.numel())


def rules_of(
    real: Mapping[str, torch.nn.Module],
    whole: Mapping[str, torch.nn.Module],
    noted: Noted,
    num_ranks: int,
) -> Rules:
    """Return the rule of each leaf at each location that holds parts on this rank.

    Args:
        real: This rank's modules by path.
        whole: Those of the unsplit model, on the meta device.
        noted: What a trial forward of one token has served.
        num_ranks: How many ranks split each layer.
    """
    known: dict[tuple[Location, int], Rule] = {}
    for path, module in real.items():
        _add_layer_rules(known, path, module, whole.get(path), num_ranks)
    _add_shared_expert_rules(known, real)
    regions = list(noted.regions())
    # Once through memory, once through rotary embeddings, and through memory again.
    _add_shared_memory(known, regions, num_ranks)
    for path, module in real.items():
        if isinstance(module, RotaryEmbeddingBase):
            _add_rotary_rules(known, path, noted)
    _add_shared_memory(known, regions, num_ranks)
    found: Rules = {}
    for location in dict.fromkeys(location for location, _ in known):
        number = len(noted.leaves_at(location))
        rules = tuple(known.get((location, index)) for index in range(number))
        if any(rules):
            found[location] = rules
    return found


def num_ids_of(real: Mapping[str, torch.nn.Module]) -> dict[Location, int]:
    """Return how many ids each embedding whose rows are split takes, by its input's location."""
    found = {}
    for path, module in real.items():
        layer: Any = without_adapter(module)
        if type(layer) in _EMBEDDINGS and layer.tp_size > 1:
            found[Location(path, "input")] = layer.num_embeddings_padded
    return found


def repacked(
    real: dict[str, torch.nn.Module],
    whole: torch.nn.Module,
    is_split: Callable[[str, str], bool],
) -> list[str]:
    """Return the paths of ``real`` whose weights are no longer those of the ``whole`` model.

    Args:
        real: This rank's modules by path.
        whole: The unsplit model.
        is_split: Whether a path's parameter has another shape because ranks split it.

    Source: vllm 0.32.0 model_executor/layers/utils.py:dispatch_cpu_unquantized_gemm packs a linear
    layer's weight for the CPU and leaves an empty one. Experts keep the shape of theirs when they
    pack it (fused_moe/experts/cpu_moe.py), so whoever has a method of its own is not believed.
    """
    found = []
    for path, module in module_paths(whole).items():
        own = real.get(path)
        if own is not None and not is_as_loaded(own):
            found.append(path)
        elif own is not None:
            shapes = {name: value.shape for name, value in own.named_parameters(recurse=False)}
            for name, value in module.named_parameters(recurse=False):
                if shapes.get(name) != value.shape and not is_split(path, name):
                    found.append(path)
                    break
    return found


def is_as_loaded(module: torch.nn.Module) -> bool:
    """Whether no method of ``module`` may have given its weights another meaning."""
    method: Any = getattr(module, "quant_method", None)
    if method is None or type(method) in PLAIN_METHODS or not module._parameters:
        return True
    backend = getattr(method, "unquantized_backend", None)
    return type(method) is UnquantizedFusedMoEMethod and backend in _PLAIN_BACKENDS


def weight_rule(
    module: torch.nn.Module,
    whole: torch.nn.Module | None,
    name: str,
    num_ranks: int,
    own: torch.Tensor | None = None,
) -> Columns | None:
    """Return how the parameter ``name`` of a layer is split, or None where each rank has it all.

    Args:
        module: The layer.
        whole: The same layer of the unsplit model.
        name: The parameter's name.
        num_ranks: How many ranks split each layer.
        own: This rank's part, where the layer does not hold it as it was loaded.
    """
    kind = type(module)
    own = getattr(module, name, None) if own is None else own
    unsplit = getattr(whole, name, None)
    if not isinstance(own, torch.Tensor) or not isinstance(unsplit, torch.Tensor):
        return None
    axes = [
        axis
        for axis, (part, full) in enumerate(zip(own.shape, unsplit.shape, strict=False))
        if part != full
    ]
    if len(axes) != 1 or own.dim() != unsplit.dim():
        return None
    (axis,) = axes
    if kind is linear.RowParallelLinear and axis == 1:
        return split_evenly(unsplit.shape[1], axis=1)
    if axis != 0:
        return None
    if kind in _EMBEDDINGS:
        # Base rows, then rows added by adapters, each padded: one group only without adapters.
        added: Any = getattr(module, "num_added_embeddings", 1)
        return split_evenly(unsplit.shape[0], axis=0) if added == 0 else None
    groups = _column_groups(module, whole, num_ranks)
    rule = None if groups is None else Columns(groups, 0)
    fits = rule is not None and sum(group.size for group in rule.groups) == unsplit.shape[0]
    return rule if fits else None


def _add_layer_rules(
    known: dict[tuple[Location, int], Rule],
    path: str,
    module: torch.nn.Module,
    whole: torch.nn.Module | None,
    num_ranks: int,
) -> None:
    layer: Any = without_adapter(module)
    kind = type(layer)
    into, out = (Location(path, "input"), 0), (Location(path, "output"), 0)
    groups = _column_groups(module, whole, num_ranks)
    if groups is not None and not layer.gather_output:
        known[out] = Columns(groups)
    elif kind is linear.RowParallelLinear and layer.tp_size > 1:
        if layer.input_is_parallel:
            known[into] = split_evenly(layer.input_size, replicas=num_ranks // layer.tp_size)
        if not layer.reduce_results:
            known[out] = Summand()
    elif kind in _EMBEDDINGS and layer.tp_size > 1 and not layer.reduce_results:
        if layer.parallel_group is None:
            known[out] = Summand()
    elif kind is MoERunner and layer.moe_config.skip_final_all_reduce:
        known[out] = Summand()


def _add_shared_expert_rules(
    known: dict[tuple[Location, int], Rule], real: Mapping[str, torch.nn.Module]
) -> None:
    """Let what a shared expert gives be a summand where its last layer leaves its sum open.

    Source: vllm 0.32.0 fused_moe/runner/moe_runner.py: `_maybe_reduce_shared_expert_output` or
    `_maybe_reduce_final_output` sums it over the ranks, alone or with what the experts give.
    """
    experts: list[Any] = [one for one in real.values() if isinstance(one, SharedExperts)]
    summing = set()
    for one in experts:
        last: Any = without_adapter(getattr(one._layer, "down_proj", one))
        if type(last) is linear.RowParallelLinear and last.tp_size > 1 and not last.reduce_results:
            summing.add(id(one._layer))
    for path, module in real.items():
        if id(module) in summing:
            known[Location(path, "output"), 0] = Summand()


def without_adapter(module: torch.nn.Module) -> torch.nn.Module:
    """Return the layer that an adapter is added to: what both give is split as it splits.

    Source: vllm 0.32.0 lora/layers: column_parallel_linear.py and row_parallel_linear.py gather and
    reduce as their base layers say.
    """
    base: Any = module
    return base.base_layer if isinstance(module, BaseLayerWithLoRA) else module


def _column_groups(
    module: torch.nn.Module, whole: torch.nn.Module | None, num_ranks: int
) -> tuple[ColumnGroup, ...] | None:
    """Return the groups of a column-parallel layer's outputs, or None for another layer."""
    layer: Any = without_adapter(module)
    kind = type(layer)
    if whole is None or type(whole) is not kind or getattr(layer, "tp_size", 1) == 1:
        return None
    if kind in (linear.ColumnParallelLinear, linear.DCPGroupColumnParallelLinear):
        return (ColumnGroup(layer.output_size, num_ranks // layer.tp_size),)
    if kind is linear.MergedColumnParallelLinear:
        unsplit: Any = whole
        # A layer that repeats columns on several ranks says so in sizes that differ.
        if list(layer.output_sizes) != list(unsplit.output_sizes):
            return None
        return tuple(ColumnGroup(size) for size in layer.output_sizes)
    if kind is linear.QKVParallelLinear:
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        replicas = layer.num_kv_head_replicas
        return (
            ColumnGroup(heads * layer.head_size),
            ColumnGroup(kv_heads * layer.head_size, replicas),
            ColumnGroup(kv_heads * layer.v_head_size, replicas),
        )
    return None


def _add_shared_memory(
    known: dict[tuple[Location, int], Rule],
    regions: Sequence[tuple[Location, int, _Region]],
    num_ranks: int,
) -> None:
    """Give values the rule of those in whose memory they lie, or which lie in theirs."""
    by_storage: dict[int, list[tuple[_Region, Columns]]] = {}
    for location, index, region in regions:
        rule = known.get((location, index))
        # Summands are summed up in place on CPUs: the same memory holds the whole later.
        if isinstance(rule, Columns):
            by_storage.setdefault(region.storage, []).append((region, rule))
    for location, index, region in regions:
        if (location, index) in known:
            continue
        for outer, rule in by_storage.get(region.storage, ()):
            if outer.start <= region.start and region.stop <= outer.stop:
                part = columns_of(
                    rule, region.start - outer.start, region.stop - outer.start, num_ranks
                )
                if part is not None:
                    known[location, index] = part
                    break


def _add_rotary_rules(known: dict[tuple[Location, int], Rule], path: str, noted: Noted) -> None:
    """Let a rotary embedding's ``(q, k)`` have one rule before and after it."""
    into, out = Location(path, "input"), Location(path, "output")
    given, given_back = noted.leaves_at(into), noted.leaves_at(out)
    for index, leaf in enumerate(given_back):
        if not isinstance(leaf, torch.Tensor) or len(given) != len(given_back) + 1:
            continue
        before, after = known.get((into, index + 1)), known.get((out, index))
        if before is not None and given[index + 1].shape == leaf.shape:
            known.setdefault((out, index), before)
        elif after is not None and given[index + 1].shape == leaf.shape:
            known.setdefault((into, index + 1), after)
