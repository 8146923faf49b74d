"""Values that ranks hold in pieces, on two tensor-parallel ranks in each of two stages.

With `NNSIGHT_PP_MATRIX=1` also the whole table of `blocks.py` on SmolLM2, whose nine heads three
ranks split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends import Engine
from engine.blocks import BLOCKS
from engine.compare import assert_same
from engine.sharded import SHARDED

needs_matrix = pytest.mark.skipif(
    os.environ.get("NNSIGHT_PP_MATRIX") != "1", reason="NNSIGHT_PP_MATRIX is not 1"
)


@pytest.fixture(scope="module")
def wanted(tiny_qwen2_path: Path) -> dict[str, Any]:
    """What each block gives on one rank."""
    engine = Engine(str(tiny_qwen2_path), 1)
    try:
        return {name: block(engine.model, engine.layers) for name, block in SHARDED.items()}
    finally:
        engine.close()


@pytest.fixture(scope="module")
def four(tiny_qwen2_path: Path, wanted: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(str(tiny_qwen2_path), 2, tp=2)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_block(name: str, four: Engine, wanted: dict[str, Any]) -> None:
    assert_same(SHARDED[name](four.model, four.layers), wanted[name], name)
    four.assert_idle()


@pytest.fixture(scope="module")
def three(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine(str(smollm2_path), 1, tp=3)
    try:
        yield engine
    finally:
        engine.close()


@needs_matrix
@pytest.mark.parametrize("name", BLOCKS)
def test_block_on_three_ranks(
    name: str, three: Engine, reference: Callable[[str], dict[str, Any]]
) -> None:
    assert_same(BLOCKS[name](three), reference(name), name)
