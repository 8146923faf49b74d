"""The logit lens as a grid: what each layer would say next, at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps

from nnsight_pp.plots.picture import (
    Picture,
    bar_beside,
    check_length,
    layer_names,
    name_cells,
    new_picture,
    shown,
    table_of,
    write_title,
)

CELL_INCHES = (0.8, 0.24)
COLOURS = "Blues"
# The brightness of a cell, of 0 to 1, below which its text is white.
DARK = 0.5


def logit_lens_grid(
    prompt_tokens: Sequence[str],
    top_tokens: Sequence[Sequence[str]],
    probability: Any,
    *,
    layers: Sequence[Any] | None = None,
    title: str = "",
) -> Picture:
    """Draw one cell for each layer and position, with its best token, coloured by its probability.

    Args:
        prompt_tokens: The prompt, one text for each position.
        top_tokens: The best token's text, one row for each layer, the first layer first.
        probability: ``[layers, positions]``, what the lens gives this token, of 0 to 1.
        layers: A name for each row. Default: their numbers.
        title: Stands above the grid.

    Returns:
        A matplotlib figure: the first layer is the lowest row.

    Raises:
        ValueError: The tables do not have the same shape, or a probability is not one.
    """
    table = table_of(probability, "probability")
    rows, columns = table.shape
    check_length(prompt_tokens, columns, "prompt_tokens")
    check_length(top_tokens, rows, "top_tokens")
    for row in top_tokens:
        check_length(row, columns, "a row of top_tokens")
    if not bool(((table >= 0) & (table <= 1)).all()):
        raise ValueError("probability must lie between 0 and 1: take the softmax of the logits.")
    names = layer_names(layers, rows)

    picture, axes = new_picture(columns * CELL_INCHES[0], rows * CELL_INCHES[1])
    image = axes.imshow(table.numpy(), cmap=COLOURS, vmin=0, vmax=1, aspect="auto", origin="lower")
    colours = colormaps[COLOURS]
    for row in range(rows):
        for column in range(columns):
            red, green, blue, _ = colours(float(table[row, column]))
            bright = 0.299 * red + 0.587 * green + 0.114 * blue
            axes.text(
                column,
                row,
                shown(top_tokens[row][column], most=9),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if bright < DARK else "black",
                parse_math=False,
            )
    name_cells(axes, prompt_tokens, names)
    bar_beside(picture, axes, image, "probability of the best token")
    write_title(axes, title)
    return picture
