"""The same block gives the same values on one rank and on two stages as in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import standard_blocks
from engine.compare import assert_same
from engine.table import BESIDE, BLOCKS, IS_WHOLE
from nnsight_pp import LanguageModel

if TYPE_CHECKING:
    from pathlib import Path

    from engine.backends import Engine
    from engine.neighbours import Neighbours

STAGES = (1, 2)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("engine", STAGES, indirect=True, ids=lambda n: f"vllm-{n}", scope="module")
def test_block(name: str, engine: Engine, reference: Callable[[str], dict[str, Any]]) -> None:
    assert_same(BLOCKS[name](engine), reference(name), name)
    assert set(engine.model.request_counts()) == {0}
    engine.assert_idle()


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize(
    "engine",
    STAGES if IS_WHOLE else STAGES[1:],
    indirect=True,
    ids=lambda n: f"vllm-{n}",
    scope="module",
)
def test_block_beside_seven_others(
    name: str,
    engine: Engine,
    neighbours: Neighbours,
    reference: Callable[[str], dict[str, Any]],
) -> None:
    with neighbours.beside():
        found = BLOCKS[name](engine)
    assert_same(found, reference(name), name)
    engine.assert_idle()


@pytest.fixture(scope="module")
def language_model(smollm2_path: Path) -> LanguageModel:
    return LanguageModel(str(smollm2_path), dtype=torch.float32, dispatch=True)


@pytest.mark.parametrize("name", standard_blocks.BLOCKS)
@pytest.mark.parametrize("engine", STAGES, indirect=True, ids=lambda n: f"vllm-{n}", scope="module")
def test_one_text_in_standard_names(
    name: str, engine: Engine, language_model: LanguageModel
) -> None:
    run = standard_blocks.BLOCKS[name]
    with torch.no_grad():
        wanted = run(language_model, standard_blocks.on_language_model(language_model))
    assert_same(run(engine.model, standard_blocks.on_vllm(engine.model)), wanted, name)
    assert set(engine.model.request_counts()) == {0}
