"""`attention_pattern(layer)`: where each token looks, computed from the heads of one layer.

No engine keeps the pattern, so it is computed again from the queries and keys that the layer really
has, and checked against what attention gave: pattern times values must be `layer.attn.z`. What an
engine does between projection and attention (norms of heads, rotary embedding) its own modules do.

Letters: T tokens of the prompt, N heads of queries, K of keys and values, D size of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nnsight_pp.envoys.architectures import location_of, node_at
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.interleave.worker import current_worker
from nnsight_pp.trace.mount import savable

if TYPE_CHECKING:
    from nnsight_pp.envoys.standard_names import Layer
    from nnsight_pp.envoys.tree_node import TreeNode

Rows = int | slice | list[int] | torch.Tensor | None


class _Heads(NamedTuple):
    """The heads of one layer: ``q`` and ``z`` are [T, N, D], the others [T, K, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor


def attention_pattern(layer: Layer, rows: Rows = None) -> Any:
    """Return how much each token attends to each: ``[heads, rows, T]``, every row sums to 1.

    It reads `.q`, `.k`, `.v` and `.z` of the layer's attention, so it stands where these would;
    what was edited in them before is in it. In the step of the prompt only.

    Args:
        layer: One of `model.layers`.
        rows: Which tokens look: an index of the prompt's tokens. Default: all.

    Raises:
        NotSupportedError: A later step, or attention of a kind that this does not compute.

    Cost: a product of all queries and keys, ``N * T * T`` numbers, on the stage of the layer.
    """
    attn, root, index = layer.attn, layer._root, layer._index
    location = location_of(index, "attn", "pattern")
    worker = current_worker(location)
    assert worker.turns is not None
    if worker.step != 0:
        raise NotSupportedError(
            explain(
                f"{location} was asked for in step {worker.step}.",
                where=worker.where(),
                why="The keys of earlier steps are in the cache of the engine.",
                todo="Ask for it in the step of the prompt.",
            )
        )
    heads = _Heads(attn.q, attn.k, attn.v, attn.z)
    node = attn._node

    def run(given: Any) -> torch.Tensor:
        return _pattern(root, node, index, _Heads(*given), rows)

    return savable(worker.turns.call(worker, node.path, tuple(heads), run))


def _pattern(root: Any, attn: TreeNode, index: int, heads: _Heads, rows: Rows) -> torch.Tensor:
    q, k = (_normed(root, attn, name, getattr(heads, name)) for name in ("q", "k"))
    q, k = root._rotated(attn, index, q, k)
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    k, v = (one.repeat_interleave(group, 1) for one in (k, heads.v))
    scores = torch.einsum("tnd,snd->nts", q, k) * _scale(attn)
    config = root._module.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    places = torch.arange(num_tokens, device=q.device)
    back = places[:, None] - places
    window = _window(config, index)
    is_seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    pattern = scores.softmax(-1, dtype=torch.float32).to(heads.v.dtype)
    _check(torch.einsum("nts,snd->tnd", pattern, v), heads.z, type(attn._module).__name__)
    return pattern if rows is None else pattern[:, rows]


def _normed(root: Any, attn: TreeNode, name: str, heads: torch.Tensor) -> torch.Tensor:
    """Return ``heads`` as the norm behind their projection gives them, where there is one."""
    norm = node_at(attn, f"{name}_norm")
    if norm is None:
        return heads
    weight: Any = norm._module.weight
    given = heads if weight.shape[-1] == heads.shape[-1] else heads.flatten(1)
    return root._run_quietly(norm, given).view_as(heads)


def _scale(attn: TreeNode) -> float:
    module: Any = attn._module
    return module.scaling if hasattr(module, "scaling") else module.scale


def _window(config: Any, index: int) -> int | None:
    """Return how many tokens back a token of this layer sees, itself included; None: all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _check(found: torch.Tensor, wanted: torch.Tensor, kind: str) -> None:
    off = (found.double() - wanted.double()).abs().max().item()
    largest = wanted.double().abs().max().item()
    # CAUTION: not a number compares false, and is an error.
    if off <= (1e-4 + 4 * torch.finfo(wanted.dtype).eps) * largest:
        return
    raise NotSupportedError(
        explain(
            f"The attention pattern of {kind} could not be computed from its heads.",
            why=f"Pattern times values is off by {off:.2g}, where what attention gave is up to "
            f"{largest:.2g}. Either it is attention of another kind, or the model runs it in an "
            "approximation (Hugging Face's sdpa leaves out Gemma 2's soft cap).",
            todo='On a local model, load it with attn_implementation="eager".',
        )
    )
