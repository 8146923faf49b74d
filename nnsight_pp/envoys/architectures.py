"""Where decoder models keep what the standard names stand for: one table.

A row of `FAMILIES` describes models by the names of their modules, on either engine. The first row
of which a model has every module is its family. Whether the modules mean what the row says is
checked with the model's own numbers (`envoys.names_check`), so a model that only looks alike is
found out.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.core.location import LOGITS, ROOT, Location
from nnsight_pp.envoys.standard_lens import Columns, First, Input, Logits, Pair, Pick

if TYPE_CHECKING:
    from nnsight_pp.envoys.tree_node import TreeNode


@dataclass(frozen=True, slots=True)
class Family:
    """Module names of one kind of decoder; those below ``norm`` are below a layer.

    Attributes:
        name: Models of this kind.
        layers: The list of layers.
        norm: The norm behind the last layer.
        attn: Attention, with all its projections.
        mlp: The feed-forward part.
        attn_adds: Whose output is what attention adds to the stream. Default: ``attn``.
        mlp_adds: The same of the feed-forward part. Default: ``mlp``.
        groups_heads: Whether several heads of queries may share one of keys and values.
    """

    name: str
    layers: str
    norm: str
    attn: str
    mlp: str
    attn_adds: str = ""
    mlp_adds: str = ""
    groups_heads: bool = True


FAMILIES = (
    Family(
        "Gemma 2, Gemma 3, OLMo 2",
        layers="model.layers",
        norm="model.norm",
        attn="self_attn",
        mlp="mlp",
        attn_adds="post_attention_layernorm",
        mlp_adds="post_feedforward_layernorm",
    ),
    Family(
        "Mixtral",
        layers="model.layers",
        norm="model.norm",
        attn="self_attn",
        mlp="block_sparse_moe",
    ),
    Family(
        "Llama, Mistral, Qwen 2 and 3, Gemma, and models laid out like them",
        layers="model.layers",
        norm="model.norm",
        attn="self_attn",
        mlp="mlp",
    ),
    Family(
        "GPT-2",
        layers="transformer.h",
        norm="transformer.ln_f",
        attn="attn",
        mlp="mlp",
        groups_heads=False,
    ),
)

# What projects the heads of attention: each its own, or fused as [q | k | v] columns.
_SEPARATE = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
_FUSED = ("qkv_proj", "c_attn")
_PROJECTS_BACK = ("o_proj", "c_proj")


class Site(NamedTuple):
    """Where one standard value is served, and how it stands there."""

    place: Location
    pick: Pick
    columns: Columns | None = None


def family_of(root: TreeNode) -> Family | None:
    """Return the family of the model below ``root``, or None."""
    for family in FAMILIES:
        first = node_at(root, f"{family.layers}.0")
        if first is None or node_at(root, family.norm) is None:
            continue
        parts = (family.attn, family.mlp, family.attn_adds, family.mlp_adds)
        if all(not part or node_at(first, part) is not None for part in parts):
            return family
    return None


def node_at(node: TreeNode | None, path: str) -> TreeNode | None:
    """Return what stands at the dotted ``path`` below ``node``, or None.

    CAUTION: of the tree, which is whole on every rank; a rank's own modules are not.
    """
    for name in path.split("."):
        node = None if node is None else node._children.get(name)
    return node


def site_of(root: TreeNode, family: Family, index: int | None, part: str, name: str) -> Site | None:
    """Return where a standard value is, or None where this model has no such value.

    Args:
        root: The model.
        family: Its family.
        index: The layer, or None for a value of the whole model.
        part: ``attn``, ``mlp``, or an empty string for the layer itself.
        name: Such as ``residual``.
    """
    if index is None:
        if name == "logits":
            return Site(Location(ROOT, "output"), Logits())
        if name == "final_norm":
            return Site(Location(f"{ROOT}.{family.norm}", "output"), First())
        return site_of(root, family, 0, "", "residual_in")
    above = f"{ROOT}.{family.layers}.{index}"
    layer = node_at(root, f"{family.layers}.{index}")
    assert layer is not None
    if not part:
        if name == "residual":
            is_apart = "residual" in _parameters(type(layer._module))
            return Site(Location(above, "output"), Pair() if is_apart else First())
        return Site(Location(above, "input"), _stream_input(layer))
    module_name = getattr(family, part)
    if name == "output":
        adds = getattr(family, f"{part}_adds") or module_name
        return Site(Location(f"{above}.{adds}", "output"), First())
    node = node_at(layer, module_name)
    assert node is not None
    if name == "input":
        return Site(Location(f"{above}.{module_name}", "input"), _stream_input(node))
    return _site_of_heads(heads_of(root, family), node, f"{above}.{module_name}", name)


def _stream_input(node: TreeNode) -> Input:
    """Return the pick of the hidden states in a call of a module, the residual added."""
    names = _parameters(type(node._module))
    name = "hidden_states" if "hidden_states" in names else names[0]
    second = (names.index("residual"), "residual") if "residual" in names else None
    return Input(names.index(name), name, second)


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a class's forward, ``self`` left out."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


class Heads(NamedTuple):
    """How many heads the attention of a model has, and of which size."""

    num_heads: int
    num_kv_heads: int
    head_size: int


def heads_of(root: TreeNode, family: Family) -> Heads:
    """Return the heads that the model's configuration states."""
    config: Any = root._module.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_shared = getattr(config, "num_key_value_heads", None) if family.groups_heads else None
    return Heads(num_heads, num_shared or num_heads, size)


def _site_of_heads(heads: Heads, attn: TreeNode, path: str, name: str) -> Site | None:
    size = heads.head_size
    q, kv = heads.num_heads * size, heads.num_kv_heads * size
    if name == "z":
        back = next((one for one in _PROJECTS_BACK if one in attn._children), None)
        if back is None:
            return None
        pick = _stream_input(attn._children[back])
        columns = Columns(0, heads.num_heads, size, q)
        return Site(Location(f"{path}.{back}", "input"), pick, columns)
    num_heads = heads.num_heads if name == "q" else heads.num_kv_heads
    own = _SEPARATE[name]
    if own in attn._children:
        columns = Columns(0, num_heads, size, num_heads * size)
        return Site(Location(f"{path}.{own}", "output"), First(), columns)
    fused = next((one for one in _FUSED if one in attn._children), None)
    if fused is None:
        return None
    start = {"q": 0, "k": q, "v": q + kv}[name]
    columns = Columns(start, num_heads, size, q + 2 * kv)
    return Site(Location(f"{path}.{fused}", "output"), First(), columns)


def location_of(index: int | None, part: str, name: str) -> Location:
    """Return what a standard value is called, alike on every engine and for every family."""
    if index is None:
        return LOGITS if name == "logits" else Location(ROOT, name)
    below = f"{ROOT}.layers.{index}"
    return Location(f"{below}.{part}" if part else below, name)
