"""The user's own names for modules (`rename=`) and his own classes for their nodes (`envoys=`).

A key of `rename` is a name or a dotted path below some node, in which ``*`` stands for any one
name, or a class, of which a node has exactly one direct child. What it names gets further names;
the paths stay. A key that leads nowhere is skipped, so that one table serves many architectures.

A key of `envoys` is a class of modules, or the end of a path: in the module's own names, or in
those that `rename` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.location import ROOT
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from nnsight_pp.envoys.tree_node import TreeNode

Key = str | type
Parts = tuple[str, ...]


@final
class Spelling:
    """How one tree is named, and of which classes its nodes are.

    Args:
        rename: Further names by key, one or a list of them.
        envoys: Classes of nodes by key, or one class for all below the root.
    """

    def __init__(
        self,
        rename: Mapping[Any, str | list[str]] | None = None,
        envoys: Mapping[Any, type] | type | None = None,
    ) -> None:
        self._names: list[tuple[Key, list[str]]] = [
            (key.lstrip(".") if isinstance(key, str) else key, _as_list(names))
            for key, names in (rename or {}).items()
        ]
        self._classes = envoys

    # -- classes -------------------------------------------------------------------------------

    def class_for(self, module: torch.nn.Module, path: str) -> Any:
        """Return the class that the user chose for the node of ``module`` at ``path``, or None."""
        if self._classes is None or isinstance(self._classes, type):
            return self._classes
        for kind in type(module).__mro__:
            if kind in self._classes:
                return self._classes[kind]
        keys = [key for key in self._classes if isinstance(key, str)]
        own = tuple(path.split("."))
        for key in keys:
            if _ends_with(own, tuple(key.split("."))):
                return self._classes[key]
        below = own[1:] if own[0] == ROOT else own
        spellings = self._spellings(below, module)
        for key in keys:
            if any(_ends_with(one, tuple(key.split("."))) for one in spellings):
                return self._classes[key]
        return None

    def _spellings(self, path: Parts, module: torch.nn.Module) -> set[Parts]:
        """Return every way to write ``path``, below the root, with the names of `rename`."""
        found = {path}
        for key, names in self._names:
            for name in names:
                new = tuple(name.split("."))
                if isinstance(key, str):
                    old = tuple(key.split("."))
                    found |= {one for known in found for one in _replaced(known, old, new)}
                elif isinstance(module, key):
                    found |= {(*known[:-1], *new) for known in found if known[-1:] == path[-1:]}
        return found

    # -- names ---------------------------------------------------------------------------------

    def bind(self, root: TreeNode) -> None:
        """Give the nodes below and including ``root`` their further names.

        Raises:
            ConfigurationError: A name is taken, or a key means several modules.
        """
        for node in list(root.nodes()) if self._names else ():
            for key, names in self._names:
                target = _of_class(node, key) if isinstance(key, type) else _at_path(node, key)
                if target is not None:
                    for name in names:
                        _bind(node, name, *target)


def _as_list(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _ends_with(path: Parts, key: Parts) -> bool:
    end = path[-len(key) :]
    return len(end) == len(key) and all(
        wanted in ("*", name) for name, wanted in zip(end, key, strict=True)
    )


def _replaced(path: Parts, old: Parts, new: Parts) -> Iterator[Parts]:
    """Yield ``path`` with each stretch that ``old`` describes written as ``new``."""
    for start in range(len(path) - len(old) + 1):
        if _ends_with(path[start : start + len(old)], old):
            yield (*path[:start], *new, *path[start + len(old) :])


def _of_class(node: TreeNode, kind: type) -> tuple[TreeNode, str] | None:
    found = [(child, name) for name, child in node._children.items() if type(child._module) is kind]
    found = found or [
        (child, name) for name, child in node._children.items() if isinstance(child._module, kind)
    ]
    return _only(node, kind.__name__, found)


def _at_path(node: TreeNode, key: str) -> tuple[TreeNode, str] | None:
    found: list[tuple[TreeNode, str]] = [(node, "")]
    for name in key.split("."):
        steps: list[tuple[TreeNode, str]] = []
        for above, path in found:
            names = list(above._children) if name == "*" else [name]
            for one in names:
                below = _child(above, one)
                if below is not None:
                    steps.append((below, f"{path}.{one}" if path else one))
        found = steps
    return _only(node, key, found)


def _child(node: TreeNode, name: str) -> TreeNode | None:
    """Return what ``name`` is on ``node`` where that is a node: a name is an attribute's."""
    known = node.__dict__.get(name)
    if known is None:
        module = node._module
        if not (hasattr(type(node), name) or hasattr(type(module), name) or name in vars(module)):
            return None
        try:
            known = getattr(node, name)
        except AttributeError:
            return None
    return known if hasattr(type(known), "_note_of") else None


def _only(
    node: TreeNode, key: str, found: list[tuple[TreeNode, str]]
) -> tuple[TreeNode, str] | None:
    if len({id(one) for one, _ in found}) > 1:
        places = ", ".join(path for _, path in found)
        raise ConfigurationError(
            explain(
                f"rename: {key!r} matches {len(found)} modules under `{node.path}` ({places}).",
                why="A further name stands for one module.",
                todo="Name each of them by its path.",
            )
        )
    return found[0] if found else None


def _bind(node: TreeNode, name: str, target: TreeNode, path: str) -> None:
    holder, alias = node, name
    if "." in name:
        above, _, alias = name.rpartition(".")
        holder, path = _holder(node, name, above, path)
    is_there = alias == path or holder.__dict__.get(alias) is target
    if is_there and (alias in holder._aliases or alias in holder._children):
        return
    taken = _taken(holder, alias, target)
    if taken:
        raise ConfigurationError(
            explain(
                f"rename: the name {alias!r} for `{target.path}` {taken}.",
                why="What was there before could not be reached any more.",
                todo="Choose another name.",
            )
        )
    holder._bind(alias, target, path)


def _holder(node: TreeNode, name: str, above: str, path: str) -> tuple[TreeNode, str]:
    """Return the node on which a dotted ``name`` is bound, and what it stands for from there."""
    parts, own = path.split("."), node
    for number, part in enumerate(parts[:-1], 1):
        own = _child(own, part)
        assert own is not None
        if ".".join(parts[:number]) == above or _child(node, above) is own:
            return own, ".".join(parts[number:])
    raise ConfigurationError(
        explain(
            f"rename: {above!r} of the name {name!r} names no ancestor of `{node.path}.{path}`.",
            why="A dotted name is bound on the module that its first part names.",
            todo="Use the path of a module that holds the renamed one.",
        )
    )


def _taken(holder: TreeNode, alias: str, target: TreeNode) -> str:
    """Return why ``alias`` cannot be bound on ``holder``, or an empty string."""
    bound = holder._aliases.get(alias)
    if bound is not None:
        known = holder.__dict__[alias]
        return "" if known is target else f"is already bound here, to `{known.path}`"
    if alias in holder.__dict__ and alias.removeprefix("E_") in holder._children:
        moved = alias.removeprefix("E_")
        if moved != alias:
            return f"is already bound here from {moved!r}"
    if alias in holder._children:
        same = holder._children[alias] is target
        return "" if same else f"would shadow the child module `{holder.path}.{alias}`"
    if hasattr(type(holder), alias):
        return f"would shadow {type(holder).__name__}.{alias}"
    if alias in holder.__dict__ or alias in ("interleaver", "_module"):
        return f"would shadow the node's own {alias!r}"
    if hasattr(type(holder._module), alias) or alias in vars(holder._module):
        return f"would shadow {type(holder._module).__name__}.{alias}"
    if alias in holder._module._parameters or alias in holder._module._buffers:
        return f"would shadow {type(holder._module).__name__}.{alias}"
    return ""
