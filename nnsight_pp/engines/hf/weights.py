"""From a tree without weights to one with them: the nodes stay, what they mirror is exchanged."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.location import ROOT
from nnsight_pp.envoys.operations import source_of
from nnsight_pp.envoys.serve_point import ServePoint

if TYPE_CHECKING:
    from nnsight_pp.engines.hf.checkpoint import Checkpoint


@final
class Weights:
    """The loaded model, once it is; shared by all roots over one tree.

    Args:
        checkpoint: Where it comes from, or None for a model that came loaded.
        module: The loaded model, or None.
    """

    __slots__ = ("checkpoint", "lock", "module", "untrue")

    def __init__(self, checkpoint: Checkpoint | None, module: torch.nn.Module | None) -> None:
        self.checkpoint = checkpoint
        self.module = module
        self.lock = threading.Lock()
        # Why standard names do not mean what they say, by location, once that is known.
        self.untrue: dict[str, str] | None = None


def repoint(root: Any, module: torch.nn.Module, except_below: str) -> None:
    """Let the tree of ``root`` mirror ``module``, which has the structure of the one before.

    A module that the user has added to the tree is added to ``module`` too.

    Args:
        root: The root of the tree, a node.
        module: What it mirrors from now on.
        except_below: The path of nodes that stand for no part of the model.
    """
    nodes = [node for node in root.nodes() if not node.path.startswith(except_below)]
    rewritten = [node for node in nodes if _has_source(node)]
    added = []
    for node in nodes:
        try:
            part = module.get_submodule(node.path[len(ROOT) + 1 :])
        except AttributeError:
            added.append(node)
        else:
            node.look_at(part)
    for node in added:
        if node.parent not in added:
            setattr(node.parent._module, node.path.rpartition(".")[2], node._module)
    root._forest.added(root)
    for node in rewritten:
        source_of(node)


def _has_source(node: Any) -> bool:
    """Tell whether the operations inside the module of ``node`` are places in the tree."""
    point = vars(node._module).get("forward")
    return isinstance(point, ServePoint) and point.body is not None


def is_part(module: torch.nn.Module, name: str) -> bool:
    """Whether ``name`` is a module in ``module``, or one of its weights."""
    return name in {**module._modules, **module._parameters, **module._buffers}


def form_of(module: torch.nn.Module, name: str, value: Any) -> Any:
    """Return ``value``, found on ``module``; of a weight that is not loaded, what it looks like.

    Torch refuses to edit that.
    """
    if not isinstance(value, torch.Tensor) or not value.is_meta or not is_part(module, name):
        return value
    with torch.inference_mode():
        return torch.empty_like(value)
