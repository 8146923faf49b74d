"""Views of the standard names travel to a rank as names. No engine is started."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.text_models import decoder_model
from nnsight_pp import UnknownLocationError
from nnsight_pp.core.block import Block
from nnsight_pp.engines.vllm.root import VLLMTree, name_of, object_of
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, encode_block


def tree() -> VLLMTree:
    return VLLMTree(decoder_model("llama").to("meta"), lambda: None)


def sent(names: dict[str, Any], root: VLLMTree) -> bytes:
    block = Block("block.py", 1, "    pass\n", "block", 0)
    return encode_block(BlockMessage("trace", block, names), lambda obj: name_of(root, obj))


def test_views_stand_on_the_tree_of_the_rank() -> None:
    here, there = tree(), tree()
    layers = here.layers
    data = sent({"layers": layers, "all": list(layers), "attn": layers[-1].attn}, here)
    names = decode_block(data, lambda name: object_of(there, name)).names
    assert names["layers"]._root is there
    assert [one._node for one in names["all"]] == list(there.model.layers)
    assert names["attn"]._node is there.model.layers[2].self_attn


def test_a_view_of_another_model_is_refused() -> None:
    with pytest.raises(UnknownLocationError, match="of another model"):
        sent({"layers": tree().layers}, tree())


def test_a_weight_outside_of_a_block_has_a_shape_and_cannot_be_edited() -> None:
    root = tree()
    weight = root.model.norm.weight
    assert weight.is_meta
    assert weight.shape == (16,)
    with pytest.raises(RuntimeError, match="Inplace update"):
        weight[0] = 1
    with pytest.raises(RuntimeError, match="Inplace update"):
        weight *= 2
