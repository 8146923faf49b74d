"""The cells of `test_blocks.py` again, with three stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from engine.blocks import BLOCKS
from engine.compare import assert_same

if TYPE_CHECKING:
    from engine.backends import Engine


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("engine", [3], indirect=True, ids=["vllm-3"], scope="module")
def test_block(name: str, engine: Engine, reference: Callable[[str], dict[str, Any]]) -> None:
    assert_same(BLOCKS[name](engine), reference(name), name)
    assert set(engine.model.request_counts()) == {0}
