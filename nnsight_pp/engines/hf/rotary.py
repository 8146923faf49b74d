"""Rotary positions of queries and keys, as transformers' own modules and functions make them.

Source: transformers 5.19 models/*/modeling_*.py: a trunk has one `rotary_emb`, whose cosines and
sines go to each layer; each file has its `apply_rotary_pos_emb`.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch


def rotated(
    module: Any, attn: torch.nn.Module, index: int, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys of a whole prompt, ``[T, N, D]``, with their positions in them.

    Args:
        module: The language model.
        attn: The attention of one of its layers.
        index: Which layer.
        q: Queries, behind their norm.
        k: Keys, behind theirs.
    """
    rotary = getattr(module.get_decoder(), "rotary_emb", None)
    apply = getattr(sys.modules[type(attn).__module__], "apply_rotary_pos_emb", None)
    if rotary is None or apply is None:
        return q, k
    places = torch.arange(len(q), device=q.device)[None]
    given = ()
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        given = (module.config.get_text_config().layer_types[index],)
    cos, sin = rotary(q[None], places, *given)
    turned = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    queries, keys = (one[0].transpose(0, 1) for one in turned)
    return queries, keys
