"""Values that ranks hold in pieces, on two tensor-parallel ranks in each of two stages.

With `NNSIGHT_PP_MATRIX=1` also the whole table of blocks: on SmolLM2, whose nine heads three ranks
split, beside the blocks above, and in two stages of two ranks on a random Qwen2 of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import standard_blocks
from engine.backends import Engine, Local
from engine.compare import assert_same
from engine.sharded import PROMPT, SHARDED, WIDE
from engine.sharded_surface import SURFACE, assert_alike_on_every_rank
from engine.table import BLOCKS, IS_WHOLE, assert_block_same
from nnsight_pp import LanguageModel

if TYPE_CHECKING:
    from engine.kept_engine import KeptEngine

PIECES = {**SHARDED, **SURFACE}
needs_matrix = pytest.mark.skipif(not IS_WHOLE, reason="NNSIGHT_PP_MATRIX is not 1")


@pytest.fixture(scope="module")
def wanted(tiny_qwen2_path: Path) -> dict[str, Any]:
    """What each block gives on one rank."""
    with closing(Engine(str(tiny_qwen2_path), 1, in_process=True)) as engine:
        return {name: block(engine.model, engine.layers) for name, block in PIECES.items()}


@pytest.fixture(scope="module")
def four(
    tiny_qwen2_path: Path, wanted: dict[str, Any], kept_engine: KeptEngine
) -> Iterator[Engine]:
    with kept_engine.lent(tiny_qwen2_path, 2, tp=2) as engine:
        yield engine


@pytest.mark.parametrize("name", PIECES)
def test_sharded_block(name: str, four: Engine, wanted: dict[str, Any]) -> None:
    assert_same(PIECES[name](four.model, four.layers), wanted[name], name)
    four.assert_idle()


@pytest.fixture(scope="module")
def named(tiny_qwen2_path: Path) -> dict[str, Any]:
    """What each block in standard names gives on Hugging Face's model."""
    local = LanguageModel(str(tiny_qwen2_path), dtype=torch.float32, dispatch=True)
    start = standard_blocks.on_language_model(local)
    with torch.no_grad():
        return {name: run(local, start) for name, run in standard_blocks.BLOCKS.items()}


@pytest.mark.parametrize("name", standard_blocks.BLOCKS)
def test_one_text_in_standard_names(name: str, four: Engine, named: dict[str, Any]) -> None:
    run = standard_blocks.BLOCKS[name]
    assert_same(run(four.model, standard_blocks.on_vllm(four.model)), named[name], name)
    four.assert_idle()


def test_standard_values_are_the_same_on_every_rank(four: Engine, tmp_path: Path) -> None:
    assert_alike_on_every_rank(four, tmp_path)


def test_a_pull_carries_the_whole_once_to_each_rank_of_the_other_stage(four: Engine) -> None:
    near, far = four.layers[0], four.layers[-1]

    def crossed() -> list[tuple[int, int, int]]:
        """Return the stage of each rank, and the pulls and bytes that came to it."""
        return [
            (
                rank["stage"],
                sum(one["pulls"] for one in rank["traffic"].values()),
                sum(one["bytes_received"] for one in rank["traffic"].values()),
            )
            for rank in four.model.statistics()
        ]

    before = crossed()
    with four.trace(PROMPT):
        heads = near.self_attn.o_proj.input
        far.self_attn.o_proj.input[:] += heads
        far.mlp.output[:] += heads
        shape = heads.shape.save()
    found = [
        (stage, pulls - old_pulls, num_bytes - old_bytes)
        for (stage, pulls, num_bytes), (_, old_pulls, old_bytes) in zip(
            crossed(), before, strict=True
        )
    ]
    whole_bytes = 4 * shape.numel()
    assert shape[1] == 128
    assert [(stage, pulls) for stage, pulls, _ in found] == [(0, 0)] * 2 + [(1, 1)] * 2
    # Names and numbers go with it, and what the stages say at the end.
    texts_bytes = [num_bytes - (stage == 1) * whole_bytes for stage, _, num_bytes in found]
    assert all(0 < one < 2000 for one in texts_bytes), texts_bytes


@pytest.fixture(scope="module")
def three(smollm2_path: Path) -> Iterator[Engine]:
    with closing(Engine(str(smollm2_path), 1, tp=3)) as engine:
        yield engine


@needs_matrix
@pytest.mark.parametrize("name", BLOCKS)
def test_block_on_three_ranks(
    name: str, three: Engine, reference: Callable[[str], dict[str, Any]]
) -> None:
    assert_same(BLOCKS[name](three), reference(name), name)


@pytest.fixture(scope="module")
def wanted_of_one(smollm2_path: Path, three: Engine) -> Callable[[str], Any]:
    """Returns what a block about pieces gives on one rank."""
    given: dict[str, Any] = {}
    with closing(Engine(str(smollm2_path), 1, in_process=True)) as engine:
        given |= {name: block(engine.model, engine.layers) for name, block in PIECES.items()}
    return given.__getitem__


@needs_matrix
@pytest.mark.parametrize("name", PIECES)
def test_sharded_block_on_three_ranks(
    name: str, three: Engine, wanted_of_one: Callable[[str], Any]
) -> None:
    """Each rank has three of nine heads, and one of three that hold keys and values."""
    assert_same(PIECES[name](three.model, three.layers), wanted_of_one(name), name)
    three.assert_idle()


@needs_matrix
@pytest.mark.parametrize("name", standard_blocks.BLOCKS)
def test_one_text_in_standard_names_on_three_ranks(
    name: str, three: Engine, smollm2_path: Path
) -> None:
    local = LanguageModel(str(smollm2_path), dtype=torch.float32, dispatch=True)
    run = standard_blocks.BLOCKS[name]
    with torch.no_grad():
        wanted = run(local, standard_blocks.on_language_model(local))
    assert_same(run(three.model, standard_blocks.on_vllm(three.model)), wanted, name)
    three.assert_idle()


@pytest.fixture(scope="module")
def wide(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    from fakes.models import make_tiny_qwen2

    folder = tmp_path_factory.mktemp("models") / "wide-qwen2"
    return str(make_tiny_qwen2(folder, smollm2_path, **WIDE))


@pytest.fixture(scope="module")
def wide_here(wide: str) -> Local:
    return Local(wide)


@pytest.fixture(scope="module")
def wide_four(wide: str) -> Iterator[Engine]:
    with closing(Engine(wide, 2, tp=2)) as engine:
        yield engine


@needs_matrix
@pytest.mark.parametrize("name", BLOCKS)
def test_block_on_two_stages_of_two_ranks(name: str, wide_four: Engine, wide_here: Local) -> None:
    assert_block_same(name, wide_four, wide_here)
