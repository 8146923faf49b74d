"""All blocks of the table, from the files that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine import blocks, blocks_of_control, blocks_of_values
from engine.compare import assert_same

if TYPE_CHECKING:
    from engine.backends import Engine, Local

BLOCKS = {**blocks.BLOCKS, **blocks_of_values.BLOCKS, **blocks_of_control.BLOCKS}


def assert_block_same(name: str, engine: Engine, local: Local) -> None:
    """Fail unless the block gives on ``engine`` what it gives on ``local``, and leaves nothing."""
    with local.context():
        wanted = BLOCKS[name](local)
    assert_same(BLOCKS[name](engine), wanted, name)
    assert set(engine.model.request_counts()) == {0}
