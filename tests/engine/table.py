"""All blocks of the table, from the files that hold them."""

from __future__ import annotations

from engine import blocks, blocks_of_control, blocks_of_values

BLOCKS = {**blocks.BLOCKS, **blocks_of_values.BLOCKS, **blocks_of_control.BLOCKS}
