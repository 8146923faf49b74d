"""Values that two CUDA devices hold in pieces, against one device.

Also with experts that each device has whole, which vLLM's CPU backend cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import Engine
from engine.compare import assert_same
from engine.expert_blocks import EXPERTS, SHARED
from engine.sharded import SHARDED
from fakes.models import make_tiny
from nnsight_pp import VLLM

# Those that bring no tensor of their own along: it would be on the CPU.
NAMES = (
    "fused_columns_in_the_order_of_the_unsplit_layer",
    "heads_as_attention_takes_them",
    "an_activation_before_and_after",
    "a_head_of_the_first_rank_zeroed",
    "a_head_of_the_last_rank_zeroed",
    "an_output_of_a_fused_layer_assigned",
    "keys_and_values_changed_before_attention",
    "reduced_outputs_counted_once",
    "a_copy_before_the_edit_of_a_fused_value",
)
MIXTURE = {**EXPERTS, **SHARED}

Run = Callable[[VLLM, Any], Any]


@pytest.fixture(scope="module", autouse=True)
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.fixture(scope="module")
def wanted(two_devices: None, tiny_qwen2_path: Path) -> dict[str, Any]:
    """What one device gives."""
    with closing(Engine(str(tiny_qwen2_path), 1)) as engine:
        return {name: SHARDED[name](engine.model, engine.layers) for name in NAMES}


@pytest.fixture(scope="module")
def engine(tiny_qwen2_path: Path, wanted: dict[str, Any]) -> Iterator[Engine]:
    with closing(Engine(str(tiny_qwen2_path), 1, tp=2)) as engine:
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_sharded_block(name: str, engine: Engine, wanted: dict[str, Any]) -> None:
    assert_same(SHARDED[name](engine.model, engine.layers), wanted[name], name)
    engine.assert_idle()


@pytest.fixture(scope="module")
def mixture(
    two_devices: None, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """A random Qwen2-MoE, and what one device gives."""
    folder = tmp_path_factory.mktemp("models") / "qwen2_moe"
    path = str(make_tiny("qwen2_moe", folder, smollm2_path))
    with closing(Engine(path, 1)) as engine:
        return path, {name: run_mixture(engine, name) for name in MIXTURE}


def run_mixture(engine: Engine, name: str) -> Any:
    return MIXTURE[name](engine.model, engine.layers, lambda layer: layer.mlp)


@pytest.fixture(scope="module", params=[False, True], ids=["split experts", "whole experts"])
def experts(
    request: pytest.FixtureRequest, mixture: tuple[str, dict[str, Any]]
) -> Iterator[Engine]:
    options = {"enable_expert_parallel": True} if request.param else {}
    with closing(Engine(mixture[0], 1, tp=2, **options)) as engine:
        yield engine


@pytest.mark.parametrize("name", MIXTURE)
def test_mixture(name: str, experts: Engine, mixture: tuple[str, dict[str, Any]]) -> None:
    assert_same(run_mixture(experts, name), mixture[1][name], name)
    experts.assert_idle()
