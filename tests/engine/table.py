"""All blocks of the table, from the files that hold them."""

from __future__ import annotations

from engine import blocks_of_control, blocks_of_values
from engine.table import BLOCKS

__all__ = ["BLOCKS", "blocks_of_control", "blocks_of_values"]
