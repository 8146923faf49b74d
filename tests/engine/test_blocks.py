"""The same block gives the same values on one rank and on two stages as in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from engine.blocks import BLOCKS
from engine.compare import assert_same

if TYPE_CHECKING:
    from engine.backends import Engine

STAGES = (1, 2)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("engine", STAGES, indirect=True, ids=lambda n: f"vllm-{n}", scope="module")
def test_block(name: str, engine: Engine, reference: Callable[[str], dict[str, Any]]) -> None:
    assert_same(BLOCKS[name](engine), reference(name), name)
    assert set(engine.model.request_counts()) == {0}
    for rank in engine.model.statistics():
        alive = ("requests", "workers", "parked", "published", "shelves", "waiting", "pending")
        assert {key: rank[key] for key in alive if rank.get(key)} == {}
