"""The printed form of a tree: torch's own, with further names, views and notes beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nnsight_pp.envoys.served_view import eproperty

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.envoys.tree_node import TreeNode


def outline(node: TreeNode) -> list[str]:
    """Return the lines that show ``node`` and all below it."""
    module = node._module
    is_list = isinstance(module, torch.nn.ModuleList)
    inside = [] if is_list else [line for line in module.extra_repr().split("\n") if line]
    views = list(_views(type(node)))
    below = list(_folded(node) if is_list else _children(node))
    below += [
        (alias, outline(node.__dict__[alias]))
        for alias, target in node._aliases.items()
        if target not in node._children
    ]
    note = node.root._note_of(node.path)
    note = f"  # {note}" if note else ""
    kind = module._get_name()
    if not below and not views and len(inside) <= 1:
        return [f"{kind}({''.join(inside)}){note}"]
    lines = [f"{kind}({note}", *[f"  {line}" for line in (*inside, *views)]]
    for label, shown in below:
        lines += [f"  ({label}): {shown[0]}", *[f"  {line}" for line in shown[1:]]]
    return [*lines, ")"]


def _views(kind: type) -> Iterator[str]:
    seen: set[str] = set()
    for one in kind.__mro__:
        for name, value in one.__dict__.items():
            if isinstance(value, eproperty) and value.description and name not in seen:
                yield str(value)
            seen.add(name)


def _label(node: TreeNode, name: str) -> str:
    further = [alias for alias, target in node._aliases.items() if target == name]
    return "/".join([*further, name])


def _children(node: TreeNode) -> Iterator[tuple[str, list[str]]]:
    for name, child in node._children.items():
        yield _label(node, name), outline(child)


def _folded(node: TreeNode) -> Iterator[tuple[str, list[str]]]:
    """Yield the children's labels and lines, runs of alike ones under one label."""
    runs: list[tuple[str, str, int, list[str]]] = []
    for name, child in node._children.items():
        lines = outline(child)
        label = _label(node, name)
        if runs and label == name and runs[-1][3] == lines and "/" not in runs[-1][1]:
            first, _, count, _ = runs[-1]
            runs[-1] = (first, name, count + 1, lines)
        else:
            runs.append((label, label, 1, lines))
    for first, last, count, lines in runs:
        if count == 1:
            yield first, lines
        else:
            yield f"{first}-{last}", [f"{count} x {lines[0]}", *lines[1:]]
