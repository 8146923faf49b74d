"""Pictures of what the suites have found: how many times the baseline each question takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.findings import Finding, Found

MOST_ROWS = 40


def draw(found: dict[str, Found], out: Path) -> dict[str, Path]:
    """Draw a picture for each suite that has ratios, beside ``out``; return title and file."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawn = {}
    for name, one in found.items():
        rows = [row for row in one.findings if row.ratio > 0]
        # Where others are timed too, their rows are in the table.
        own = [row for row in rows if row.name.endswith(", ours")]
        rows = (own or rows)[:MOST_ROWS]
        if rows:
            path = out.with_name(f"{out.stem}-{name.partition(',')[0]}.png")
            _ratios(name, rows, path)
            drawn[f"{name}: times the baseline"] = path
    return drawn


def _ratios(name: str, rows: list[Finding], path: Path) -> None:
    """Draw each row as a point on a logarithmic axis, with the spread of its pairs and its goal."""
    from matplotlib import pyplot

    height = 1.2 + 0.3 * len(rows)
    figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
    for place, row in enumerate(rows):
        ratio = row.ratio
        is_over = row.goal is not None and ratio > row.goal
        color = "tab:red" if is_over else "tab:blue"
        low, high = _spread(row)
        axes.plot([low, high], [place, place], color=color, alpha=0.4, linewidth=4)
        axes.plot([ratio], [place], "o", color=color)
        if row.goal is not None:
            axes.plot([row.goal], [place], "|", color="black", markersize=14)
        axes.annotate(
            f"{ratio:.2f}", (max(high, ratio), place), (6, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{row.title}  /  {row.beside_title}" for row in rows])
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    marks: dict[str, Any] = {"which": "both", "axis": "x"}
    axes.grid(alpha=0.2, **marks)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set_title(f"{name}: times the baseline (| is the goal)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _spread(row: Finding) -> tuple[float, float]:
    """Return the quartiles of the pairs' ratios, or the ratio twice where there are no pairs."""
    if not row.is_paired or len(row.samples) < 4:
        return row.ratio, row.ratio
    ratios = sorted(row.pair_ratios())
    return ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
