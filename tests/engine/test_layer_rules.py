"""The rules of parts against vLLM's own layer classes, each built as every rank builds it.

The ranks are made one after the other in this process, with a group that only says where each
stands, and load one checkpoint by vLLM's loaders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm.distributed.parallel_state as groups
from torch.nn.functional import linear as product
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

from nnsight_pp.core.location import Location
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.layers import Noted, num_ids_of, rules_of, weight_rule
from nnsight_pp.engines.vllm.shared_experts import forget_outputs, run_in_turn, shared_experts
from nnsight_pp.envoys.serve_point import module_paths
from nnsight_pp.parallel.parts import ColumnGroup, Columns, Summand, join, share

PATH = "model.layer"
INTO, OUT = Location(PATH, "input"), Location(PATH, "output")
SIZE = 8


class Standing:
    """A tensor-parallel group that says where its rank stands, and moves nothing."""

    ranks: tuple[int, ...] = ()
    device_group = cpu_group = None
    unique_name = "tp"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size = size


def built(
    make: Callable[[], torch.nn.Module],
    num_ranks: int,
    dcp: int = 1,
    *,
    is_whole: bool = False,
) -> list[Any]:
    """Return the layer as each of ``num_ranks`` ranks has it, its experts whole or split."""
    layers = []
    for rank in range(num_ranks):
        config = VllmConfig()
        parallel = config.parallel_config
        parallel.decode_context_parallel_size = dcp
        parallel.tensor_parallel_size = num_ranks
        parallel.enable_expert_parallel = is_whole
        with compat._one_rank_world(), set_current_vllm_config(config):
            standing: Any = Standing(rank, num_ranks)
            groups._TP = groups._EP = standing
            layers.append(make())
    return layers


def load(layer: Any, pieces: dict[Any, torch.Tensor], name: str) -> None:
    """Give a layer its share of a checkpoint, ``pieces`` by vLLM's name of each."""
    parameter = getattr(layer, name)
    for key, piece in pieces.items():
        arguments = () if key is None else (key,)
        parameter.weight_loader(parameter, piece, *arguments)


def column() -> torch.nn.Module:
    return linear.ColumnParallelLinear(SIZE, 24)


def merged() -> torch.nn.Module:
    return linear.MergedColumnParallelLinear(SIZE, [12, 24])


def fused_heads() -> torch.nn.Module:
    return linear.QKVParallelLinear(SIZE, 4, 12, 4)


def few_heads() -> torch.nn.Module:
    return linear.QKVParallelLinear(SIZE, 4, 12, 2)


CHECKPOINTS: dict[Any, dict[Any, int]] = {
    column: {None: 24},
    merged: {0: 12, 1: 24},
    fused_heads: {"q": 48, "k": 16, "v": 16},
    few_heads: {"q": 48, "k": 8, "v": 8},
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make", CHECKPOINTS)
def test_column_parallel_layers_come_in_the_order_of_the_unsplit_one(
    make: Callable[[], torch.nn.Module], num_ranks: int
):
    torch.manual_seed(0)
    weights = {key: torch.randn(rows, SIZE) for key, rows in CHECKPOINTS[make].items()}
    biases = {key: torch.randn(rows) for key, rows in CHECKPOINTS[make].items()}
    (whole,), parts = built(make, 1), built(make, num_ranks)
    for layer in (whole, *parts):
        load(layer, weights, "weight")
        load(layer, biases, "bias")
    given = torch.randn(3, SIZE)
    outputs = [product(given, layer.weight, layer.bias) for layer in parts]
    wanted = product(given, whole.weight, whole.bias)
    for rank, layer in enumerate(parts):
        noted = Noted()
        noted.serve(OUT, (outputs[rank][:1], None))
        rules = rules_of({PATH: layer}, {PATH: whole}, noted, num_ranks)
        assert set(rules) == {OUT}
        rule, none = rules[OUT]
        assert none is None
        assert isinstance(rule, Columns)
        assert torch.allclose(join(rule, outputs), wanted, atol=1e-5)
        assert torch.equal(share(rule, join(rule, outputs), rank, num_ranks), outputs[rank])
        for name in ("weight", "bias"):
            split = weight_rule(layer, whole, name, num_ranks)
            assert split is not None
            pieces = [getattr(one, name) for one in parts]
            assert torch.equal(join(split, pieces), getattr(whole, name))


@pytest.mark.parametrize("reduces", [True, False])
def test_row_parallel_layers_take_columns_and_may_give_summands(reduces: bool):
    def make() -> torch.nn.Module:
        return linear.RowParallelLinear(24, SIZE, bias=False, reduce_results=reduces)

    (whole,), parts = built(make, 1), built(make, 3)
    weight = torch.randn(SIZE, 24)
    for layer in (whole, *parts):
        load(layer, {None: weight}, "weight")
    given = torch.randn(2, 24)
    noted = Noted()
    noted.serve(INTO, ((given[:1, :8],), {}))
    noted.serve(OUT, (torch.zeros(1, SIZE), None))
    rules = rules_of({PATH: parts[0]}, {PATH: whole}, noted, 3)
    (rule,) = rules[INTO]
    assert isinstance(rule, Columns)
    assert rules.get(OUT) == (None if reduces else (Summand(), None))
    products = [
        product(share(rule, given, rank, 3), layer.weight) for rank, layer in enumerate(parts)
    ]
    assert torch.allclose(torch.stack(products).sum(0), product(given, weight), atol=1e-5)
    split = weight_rule(parts[0], whole, "weight", 3)
    assert split is not None
    assert torch.equal(join(split, [layer.weight for layer in parts]), weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: linear.ReplicatedLinear(SIZE, 24, bias=False),
        lambda: linear.ColumnParallelLinear(SIZE, 24, bias=False, disable_tp=True),
        lambda: linear.ColumnParallelLinear(SIZE, 24, bias=False, gather_output=True),
        lambda: linear.RowParallelLinear(24, SIZE, bias=False, input_is_parallel=False),
    ],
    ids=["replicated", "not split", "gathered", "splits by itself"],
)
def test_layers_whose_values_are_whole_have_no_rule(make: Callable[[], torch.nn.Module]):
    (whole,), parts = built(make, 1), built(make, 2)
    noted = Noted()
    noted.serve(INTO, ((torch.zeros(1, SIZE),), {}))
    noted.serve(OUT, (torch.zeros(1, 24), None))
    assert rules_of({PATH: parts[1]}, {PATH: whole}, noted, 2) == {}


def test_a_layer_split_over_groups_of_ranks_is_held_alike_within_each():
    """Decode context parallelism: two ranks of four hold the same heads."""

    def make() -> torch.nn.Module:
        return linear.DCPGroupColumnParallelLinear(SIZE, 24, bias=False)

    (whole,), parts = built(make, 1), built(make, 4, dcp=2)
    weight = torch.randn(24, SIZE)
    for layer in (whole, *parts):
        load(layer, {None: weight}, "weight")
    given = torch.randn(2, SIZE)
    outputs = [product(given, layer.weight) for layer in parts]
    noted = Noted()
    noted.serve(OUT, (outputs[3][:1], None))
    (rule, _) = rules_of({PATH: parts[3]}, {PATH: whole}, noted, 4)[OUT]
    assert isinstance(rule, Columns)
    assert torch.allclose(join(rule, outputs), product(given, weight), atol=1e-5)


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, ParallelLMHead])
def test_rows_of_a_vocabulary_are_joined(kind: type):
    (whole,), parts = built(lambda: kind(100, SIZE), 1), built(lambda: kind(100, SIZE), 2)
    rows = torch.randn(100, SIZE)
    for layer in (whole, *parts):
        load(layer, {None: rows}, "weight")
    split = weight_rule(parts[0], whole, "weight", 2)
    assert split is not None
    assert torch.equal(join(split, [layer.weight for layer in parts]), whole.weight)
    assert torch.equal(whole.weight[:100], rows)
    assert num_ids_of({PATH: parts[0]}) == {INTO: 128}


def test_a_layer_of_another_class_has_no_rule():
    class Grouped(linear.ColumnParallelLinear):
        """Splits its columns in a way of its own."""

    (whole,), parts = built(lambda: Grouped(SIZE, 24), 1), built(lambda: Grouped(SIZE, 24), 2)
    noted = Noted()
    noted.serve(OUT, (torch.zeros(1, 12), None))
    assert rules_of({PATH: parts[0]}, {PATH: whole}, noted, 2) == {}
    assert weight_rule(parts[0], whole, "weight", 2) is None


def test_values_in_the_memory_of_a_fused_output_are_split_as_it_is():
    (whole,), parts = built(few_heads, 1), built(few_heads, 4)
    fused = torch.zeros(1, 20)
    query, key, value = fused.split([12, 4, 4], dim=-1)
    mixed = torch.zeros(1, 12)
    attention = Location("model.attn", "input")
    noted = Noted()
    noted.serve(OUT, (fused, None))
    noted.serve(attention, ((query.view(1, 3, 4), key, value), {}))
    noted.serve(Location("model.attn", "output"), mixed)
    noted.serve(Location("model.half", "output"), fused[:, :6])
    rules = rules_of({PATH: parts[2]}, {PATH: whole}, noted, 4)
    assert set(rules) == {OUT, attention}
    groups_of = [rule.groups for rule in rules[attention] if isinstance(rule, Columns)]
    assert groups_of == [((48, 1),), ((8, 2),), ((8, 2),)]


@pytest.mark.parametrize("is_whole", [False, True], ids=["split experts", "whole experts"])
@pytest.mark.parametrize("reduces", [True, False])
def test_what_experts_give_is_whole_or_a_summand(reduces: bool, is_whole: bool):
    """A rank has a part of every expert, or some experts whole: what it sums is one of several."""

    def make() -> torch.nn.Module:
        return FusedMoEFactory(4, 2, 64, 128, prefix="experts", reduce_results=reduces)

    (whole,) = built(make, 1)
    parts = built(make, 2, is_whole=is_whole)
    given = torch.zeros(1, 64)
    for layer in parts:
        experts = layer.routed_experts
        assert experts.w13_weight.shape[0] == (2 if is_whole else 4)
        noted = Noted()
        noted.serve(INTO, ((given, torch.zeros(1, 4)), {}))
        noted.serve(OUT, given.clone())
        rules = rules_of({PATH: layer}, {PATH: whole}, noted, 2)
        assert rules == ({} if reduces else {OUT: (Summand(),)})
        assert weight_rule(experts, whole.routed_experts, "w13_weight", 2) is None


@pytest.mark.parametrize("reduces", [True, False])
def test_what_a_shared_expert_gives_is_a_summand_where_its_last_layer_leaves_the_sum(reduces: bool):
    def make() -> torch.nn.Module:
        expert = Qwen2MoeMLP(64, 32, "silu", reduce_results=reduces, prefix="shared")
        experts = FusedMoEFactory(
            num_experts=4, top_k=2, hidden_size=64, intermediate_size=128,
            shared_experts=expert, prefix="experts",
        )  # fmt: skip
        return torch.nn.ModuleDict({"shared": expert, "experts": experts})

    (whole,), parts = built(make, 1), built(make, 2)
    noted = Noted()
    out = Location("model.shared", "output")
    noted.serve(out, torch.zeros(1, 64))
    rules = rules_of(module_paths(parts[1]), module_paths(whole), noted, 2)
    assert rules == ({} if reduces else {out: (Summand(),)})


def test_shared_experts_run_in_turn_and_leave_nothing_of_a_failed_step():
    (layer,) = built(
        lambda: FusedMoEFactory(
            num_experts=4, top_k=2, hidden_size=64, intermediate_size=128,
            shared_experts=torch.nn.Identity(), prefix="experts",
        ),
        1,
    )  # fmt: skip
    (experts,) = shared_experts(layer)
    stream: Any = object()
    experts._stream = stream
    with pytest.raises(ZeroDivisionError), run_in_turn([experts]):
        assert experts._stream is None
        experts(torch.ones(1), SharedExpertsOrder.NO_OVERLAP)
        raise ZeroDivisionError
    assert experts._stream is stream
    forget_outputs([experts])
    with run_in_turn([experts]):
        experts(torch.zeros(1), SharedExpertsOrder.NO_OVERLAP)
    assert experts.output.tolist() == [0]


def test_latent_attention_has_heads_in_parts_and_latents_whole():
    """The projections of DeepSeek's attention, and what its kernel takes and gives on one rank."""
    heads, size, latent = 8, 6, 10

    def layers() -> dict[str, torch.nn.Module]:
        return {
            "fused_qkv_a_proj": DeepSeekV2FusedQkvAProjLinear(SIZE, [12, latent + 2]),
            "q_b_proj": linear.ColumnParallelLinear(12, heads * size, bias=False),
            "kv_b_proj": linear.ColumnParallelLinear(latent, heads * 2 * size, bias=False),
            "o_proj": linear.RowParallelLinear(heads * size, SIZE, bias=False),
        }

    (whole,), parts = (
        built(lambda: torch.nn.ModuleDict(layers()), 1),
        built(lambda: torch.nn.ModuleDict(layers()), 2),
    )
    own = dict(parts[1].items())
    query, mixed = torch.zeros(1, heads // 2 * size), torch.zeros(1, heads // 2 * size)
    latents = torch.zeros(1, latent + 2)
    compressed, position = latents.split([latent, 2], -1)
    noted = Noted()
    noted.serve(Location("fused_qkv_a_proj", "output"), (torch.zeros(1, 24), None))
    noted.serve(Location("q_b_proj", "output"), (query, None))
    attention = Location("mla_attn", "input")
    noted.serve(attention, ((query.view(1, heads // 2, size), compressed, position), {}))
    noted.serve(Location("mla_attn", "output"), mixed)
    noted.serve(Location("o_proj", "input"), ((mixed,), {}))
    rules = rules_of(own, dict(whole.items()), noted, 2)
    in_heads = Columns((ColumnGroup(heads * size),))
    assert rules == {
        Location("q_b_proj", "output"): (in_heads, None),
        attention: (in_heads, None, None),
        Location("mla_attn", "output"): (in_heads,),
        Location("o_proj", "input"): (in_heads,),
    }
    for name, axis in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
        split = weight_rule(own[name], whole[name], "weight", 2)
        assert split is not None
        assert split.axis == axis
    assert weight_rule(own["fused_qkv_a_proj"], whole["fused_qkv_a_proj"], "weight", 2) is None
