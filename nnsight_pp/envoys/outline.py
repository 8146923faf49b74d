"""The printed form of a tree: torch's own, with runs of alike children folded into one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.envoys.envoy import Envoy


def outline(node: Envoy, name: str = "") -> list[str]:
    """Return the lines that show ``node`` and all below it."""
    kind = type(node._module).__name__
    head = f"({name}): {kind}" if name else kind
    note = node.root._note_of(node.path)
    note = f"  # {note}" if note else ""
    if not node._children:
        return [f"{head}({node._module.extra_repr()}){note}"]
    lines = [f"{head}({note}"]
    for label, child_lines in _folded(node):
        lines += [f"  {child_lines[0].replace('(?)', f'({label})', 1)}"]
        lines += [f"  {line}" for line in child_lines[1:]]
    return [*lines, ")"]


def _folded(node: Envoy) -> Iterator[tuple[str, list[str]]]:
    """Yield the children's labels and lines, runs of alike numbered ones under one label."""
    first, last, shown = "", "", []
    for name, child in node._children.items():
        lines = outline(child, "?")
        if shown and name.isdigit() and first.isdigit() and lines == shown:
            last = name
            continue
        if shown:
            yield _label(first, last), shown
        first, last, shown = name, name, lines
    if shown:
        yield _label(first, last), shown


def _label(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"
