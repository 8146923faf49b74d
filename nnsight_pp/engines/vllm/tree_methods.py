"""What the modules of an engine's tree let be done: they name what the ranks hold.

A method of a torch module that hands out weights, or changes the module, would do so to a tree of
which nothing runs; what is set on it would be set there alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.envoys.module_methods import instead_of, is_changing
from nnsight_pp.errors import NotSupportedError, Where, explain

if TYPE_CHECKING:
    from nnsight_pp.engines.vllm.rank_weights import RankWeights
    from nnsight_pp.envoys.tree_node import TreeNode

_HANDING_OUT = frozenset(
    [
        *("parameters", "named_parameters", "get_parameter", "buffers", "named_buffers"),
        *("get_buffer", "state_dict"),
    ]
)


def method_of(
    node: TreeNode, name: str, value: Any, weights: RankWeights | None, where: Where | None
) -> Any:
    """Return ``value``, found on the module of ``node``, or what stands for it.

    Args:
        node: Whose module it is.
        name: Its name there.
        value: Anything but a tensor.
        weights: On a client outside of a block, the way to the weights of the ranks.
        where: The line of a block, or None.

    Raises:
        NotSupportedError: It hands out the weights of the module, or changes it.
    """
    if getattr(value, "__self__", None) is not node._module:
        return value
    if name == "eval":
        return lambda: node  # it is in this mode
    if name == "train":
        return lambda mode=True: _in_mode(node, mode, where)
    if is_changing(node._module, name, value):
        raise changed(node, name, where)
    if name not in _HANDING_OUT:
        return value
    if weights is not None and name == "named_parameters":
        return lambda *a, **k: weights.named(node, *a, **k)
    if weights is not None and name == "parameters":
        return lambda recurse=True: (one for _, one in weights.named(node, recurse=recurse))
    raise NotSupportedError(
        explain(
            f"{node.path}.{name} was asked for.",
            where=where,
            why="The weights are on the ranks, and each holds only a part of them.",
            todo="Take a weight by its name, such as `module.weight`; between the traces, "
            "`named_parameters()` has all names.",
        )
    )


def _in_mode(node: TreeNode, is_training: bool, where: Where | None) -> TreeNode:
    if is_training:
        raise changed(node, "train", where)
    return node


def changed(node: TreeNode, name: str, where: Where | None) -> NotSupportedError:
    """Return the error for the method ``name``, which changes the module of ``node``."""
    return NotSupportedError(
        explain(
            f"{node.path}.{name} was asked for on an engine.",
            where=where,
            why="The ranks hold the model; this tree only names its parts.",
            todo=instead_of(name),
        )
    )


def set_in_block(node: TreeNode, name: str, where: Where | None) -> NotSupportedError:
    """Return the error for an attribute that a block sets."""
    return NotSupportedError(
        explain(
            f"{node.path}.{name} was set inside a block.",
            where=where,
            why="The model on an engine is shared by every request.",
            todo="Use a variable of the block, or assign to .output or .input.",
        )
    )


def check_set(node: TreeNode, name: str, value: Any) -> None:
    """Raise where setting ``name`` outside of a block would replace a part of the model.

    Raises:
        NotSupportedError: It is a module, or the module of ``node`` has an attribute of this name.
    """
    if issubclass(type(value), torch.nn.Module) or hasattr(node._module, name):
        raise NotSupportedError(
            explain(
                f"{node.path}.{name} was set on an engine.",
                why="The ranks hold the model; it would be set on this tree, and not there.",
                todo=instead_of("set_submodule"),
            )
        )
