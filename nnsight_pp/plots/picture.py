"""The figure that every plot returns, and how tokens and layers are written on it.

A figure is made without pyplot, so that there is nothing to close and no backend to choose.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.image import AxesImage

DOTS_PER_INCH = 130
MARGIN_INCHES = 1.6
# Room for a title, a legend, and the label of a colour bar.
LEAST_INCHES = (4.6, 3.4)
# Wider or higher than this no screen or page shows a figure whole; cells shrink instead.
MOST_INCHES = 40.0
MOST_LAYER_LABELS = 40
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# What stands for letters that an eye cannot see.
_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@final
class Picture(Figure):
    """A matplotlib figure that a notebook shows without any set-up; `savefig` writes a file."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png")
        return drawn.getvalue()


def new_picture(width: float, height: float) -> tuple[Picture, Axes]:
    """Return an empty figure for a drawing of this size in inches, margins not counted."""
    wide, high = (
        min(max(inches + MARGIN_INCHES, least), MOST_INCHES)
        for inches, least in zip((width, height), LEAST_INCHES, strict=True)
    )
    picture = Picture(figsize=(wide, high), dpi=DOTS_PER_INCH, layout="constrained")
    return picture, picture.add_subplot()


def table_of(values: Any, what: str) -> torch.Tensor:
    """Return ``values`` as a table of floats on the CPU, one row for each layer.

    Args:
        values: A tensor ``[layers, positions]``, or a list of rows.
        what: The name of the argument, for the error.
    """
    if not isinstance(values, torch.Tensor) and isinstance(values, Sequence):
        values = [torch.as_tensor(row).detach().cpu() for row in values]
        values = torch.stack(values) if values else torch.empty(0)
    table = torch.as_tensor(values).detach().to("cpu", torch.float64)
    if table.dim() != 2 or not table.numel():
        raise ValueError(f"{what} must be a table with rows and columns, not {list(table.shape)}.")
    return table


def check_length(given: Sequence[Any], wanted: int, what: str) -> None:
    """Refuse a list of names that does not have one for each row or column."""
    if len(given) != wanted:
        raise ValueError(f"{what}: {len(given)} were given, and there are {wanted} to name.")


def shown(token: str, most: int = 12) -> str:
    r"""Return a token as text that can be seen and drawn: its spaces and its odd characters.

    >>> shown(" Paris"), shown("\n"), shown("internationalisation")
    ('␣Paris', '⏎', 'internation…')
    """
    known = get_font(findfont(FontProperties())).get_charmap()
    text = "".join(_VISIBLE.get(letter, letter) for letter in token)
    text = "".join(
        letter if ord(letter) in known else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return text if len(text) <= most else text[: most - 1] + "…"


def drawable(text: str) -> str:
    """Return ``text`` with a mark in place of each letter that the font does not have."""
    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(one if one == "\n" or ord(one) in known else UNKNOWN for one in text)


def write_title(axes: Axes, title: str, pad: float = 6) -> None:
    """Write ``title`` above the drawing, broken into lines where it is too long."""
    if title:
        axes.set_title(drawable(title), fontsize=10, parse_math=False, wrap=True, pad=pad)


def name_cells(axes: Axes, tokens: Sequence[str], layers: Sequence[str]) -> None:
    """Write the prompt's tokens below the columns, and the layers beside the rows."""
    labels = [shown(token) for token in tokens]
    axes.set_xticks(range(len(tokens)), labels, parse_math=False, fontsize=8, rotation=90)
    every = -(-len(layers) // MOST_LAYER_LABELS)
    rows = range(0, len(layers), every)
    axes.set_yticks(rows, [layers[row] for row in rows], parse_math=False, fontsize=7)
    axes.set_xlabel("prompt", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def layer_names(layers: Sequence[Any] | None, number: int) -> list[str]:
    """Return one name for each row: those given, or their numbers."""
    if layers is None:
        return [str(index) for index in range(number)]
    check_length(layers, number, "layers")
    return [drawable(str(name)) for name in layers]


def bar_beside(picture: Picture, axes: Axes, image: AxesImage, label: str) -> Colorbar:
    """Draw the colours of ``image`` as a bar at its right."""
    bar = picture.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label(drawable(label), fontsize=8, parse_math=False)
    bar.ax.tick_params(labelsize=7)
    bar.ax.set_frame_on(False)
    return bar
