"""What a patch at each layer and position does, and where that is no more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.patches import Patch, Rectangle

from nnsight_pp.plots.picture import (
    Picture,
    bar_beside,
    check_length,
    layer_names,
    name_cells,
    new_picture,
    table_of,
    write_title,
)

CELL_INCHES = (0.42, 0.2)
COLOURS = "RdBu_r"
GREY = {"facecolor": "0.93", "edgecolor": "0.75", "hatch": "////", "linewidth": 0.0}


def patching_heatmap(
    effect: Any,
    prompt_tokens: Sequence[str],
    *,
    floor: float,
    layers: Sequence[Any] | None = None,
    metric: str = "effect",
    title: str = "",
) -> Picture:
    """Draw the effect of a patch at each layer and position; hatched where it is noise.

    Args:
        effect: ``[layers, positions]``, the change that the patch makes; NaN where none was made.
        prompt_tokens: The prompt, one text for each position.
        floor: The noise floor: the largest effect of patches that change nothing (a run patched
            with its own values), in the units of ``effect``.
        layers: A name for each row. Default: their numbers.
        metric: What the colours mean, with its unit.
        title: Stands above the map.

    Returns:
        A matplotlib figure: the first layer is the lowest row, the colours are symmetric around 0,
        and the floor is marked on the colour bar.

    Raises:
        ValueError: The names do not fit the table, or the floor is negative.
    """
    table = table_of(effect, "effect")
    rows, columns = table.shape
    check_length(prompt_tokens, columns, "prompt_tokens")
    if not floor >= 0:
        raise ValueError(f"floor must be zero or more, not {floor}.")
    names = layer_names(layers, rows)
    size = table.abs()
    most = float(size.nan_to_num(0.0).max()) or floor or 1.0

    picture, axes = new_picture(columns * CELL_INCHES[0], rows * CELL_INCHES[1])
    image = axes.imshow(
        table.numpy(), cmap=COLOURS, vmin=-most, vmax=most, aspect="auto", origin="lower"
    )
    quiet = [(int(row), int(column)) for row, column in (size <= floor).nonzero()]
    cells = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in quiet]
    axes.add_collection(PatchCollection(cells, match_original=False, **GREY))
    name_cells(axes, prompt_tokens, names)
    bar = bar_beside(picture, axes, image, metric)
    bar.ax.axhspan(max(-floor, -most), min(floor, most), **GREY)
    for line in (-floor, floor):
        bar.ax.axhline(line, color="black", linewidth=1)
    axes.legend(
        handles=[Patch(label=f"not above the noise floor, ±{floor:.2g}", **GREY)],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize=7,
    )
    write_title(axes, title, pad=20)
    return picture
