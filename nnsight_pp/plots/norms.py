"""How long the residual stream is at each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.ticker import MaxNLocator

from nnsight_pp.plots.picture import (
    Picture,
    check_length,
    new_picture,
    shown,
    table_of,
    write_title,
)

SIZE_INCHES = (6.0, 3.2)
COLOURS = "viridis"
# More lines than this are told apart by a legend no longer.
MOST_NAMED = 20
LETTERS = 24


def norm_by_layer(
    norms: Any,
    names: Sequence[str],
    *,
    log: bool = True,
    title: str = "",
) -> Picture:
    """Draw the norm of the stream over the layers, one line for each prompt or position.

    Args:
        norms: ``[layers, lines]``, the norm after each layer, the first layer first.
        names: What each line is: a prompt, or a position's token.
        log: Whether the norms stand on a logarithmic scale: a first token often has a hundred
            times the norm of the others.
        title: Stands above the lines.

    Returns:
        A matplotlib figure: one line for each column, and their median in black.

    Raises:
        ValueError: The names do not fit the table, or a norm is negative.
    """
    table = table_of(norms, "norms")
    rows, columns = table.shape
    check_length(names, columns, "names")
    if not bool((table >= 0).all()):
        raise ValueError("norms must be zero or more.")

    picture, axes = new_picture(*SIZE_INCHES)
    colours = colormaps[COLOURS]
    layers = range(rows)
    for column, name in enumerate(names):
        place = column / max(columns - 1, 1)
        # The number also keeps a name that begins with an underscore, which a legend leaves out.
        label = f"{column}  {shown(name, LETTERS)}" if columns <= MOST_NAMED else "_unnamed"
        axes.plot(layers, table[:, column].numpy(), color=colours(0.9 * place), lw=1, label=label)
    median = table.quantile(0.5, dim=1).numpy()
    axes.plot(layers, median, color="black", lw=2.4, label=f"median of {columns}")
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("norm of the residual stream")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", linewidth=0.4, color="0.85")
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7)
    for text in legend.get_texts():
        text.set_parse_math(False)
    write_title(axes, title)
    return picture
