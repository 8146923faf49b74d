"""The cells of `test_blocks.py` where a stage in the middle can matter, again, with three stages.

`NNSIGHT_PP_MATRIX=1` runs all of them, as `make matrix` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import standard_blocks
from engine.compare import assert_same
from engine.table import BLOCKS, IS_WHOLE, ON_THREE
from nnsight_pp import LanguageModel

if TYPE_CHECKING:
    from pathlib import Path

    from engine.backends import Engine
    from engine.neighbours import Neighbours


@pytest.mark.parametrize("name", ON_THREE)
@pytest.mark.parametrize("engine", [3], indirect=True, ids=["vllm-3"], scope="module")
def test_block(name: str, engine: Engine, reference: Callable[[str], dict[str, Any]]) -> None:
    assert_same(BLOCKS[name](engine), reference(name), name)
    assert set(engine.model.request_counts()) == {0}


@pytest.mark.skipif(not IS_WHOLE, reason="NNSIGHT_PP_MATRIX is not 1")
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("engine", [3], indirect=True, ids=["vllm-3"], scope="module")
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


@pytest.mark.parametrize("engine", [3], indirect=True, ids=["vllm-3"], scope="module")
def test_one_text_in_standard_names(engine: Engine, smollm2_path: Path) -> None:
    local = LanguageModel(str(smollm2_path), dtype=torch.float32, dispatch=True)
    run = standard_blocks.edits_in_place_on_both_ends
    with torch.no_grad():
        wanted = run(local, standard_blocks.on_language_model(local))
    assert_same(run(engine.model, standard_blocks.on_vllm(engine.model)), wanted, "edits")
