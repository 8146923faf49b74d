"""Mixtures of experts on two tensor-parallel ranks, against one rank and Hugging Face's models.

Expert parallelism, where each rank has some of the experts whole, does not run on vLLM's CPU
backend (`test_layer_rules.py` has its rules), and is refused there before an engine starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import standard_blocks
from engine.backends import Engine
from engine.compare import assert_logits_as, assert_same
from engine.expert_blocks import EXPERTS, SHARED
from engine.sharded import PROMPT
from fakes.models import make_tiny
from nnsight_pp import (
    VLLM,
    BlockError,
    ConfigurationError,
    LanguageModel,
    NotServedError,
    NotSupportedError,
)


class Family:
    """One family: its engines on one rank and on two, and what one rank gives."""

    def __init__(self, name: str, path: Path) -> None:
        self.path = path
        self.mixture = "block_sparse_moe" if name == "mixtral" else "mlp"
        self.blocks = EXPERTS | (SHARED if name == "qwen2_moe" else {})
        self.one = Engine(str(path), 1, in_process=True)
        self.wanted = {block: self.run(block, self.one) for block in self.blocks}
        self.engine = Engine(str(path), 1, tp=2)

    def run(self, block: str, engine: Engine) -> Any:
        return self.blocks[block](
            engine.model, engine.layers, lambda layer: getattr(layer, self.mixture)
        )

    def close(self) -> None:
        self.one.close()
        self.engine.close()


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe"])
def family(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp("experts") / request.param
    with contextlib.closing(
        Family(request.param, make_tiny(request.param, folder, smollm2_path))
    ) as family:
        yield family


@pytest.mark.parametrize("name", EXPERTS)
def test_block(name: str, family: Family) -> None:
    assert_same(family.run(name, family.engine), family.wanted[name], name)
    family.engine.assert_idle()


@pytest.mark.parametrize("family", ["qwen2_moe"], indirect=True)
@pytest.mark.parametrize("name", SHARED)
def test_shared_expert(name: str, family: Family) -> None:
    assert_same(family.run(name, family.engine), family.wanted[name], name)
    family.engine.assert_idle()


@pytest.mark.parametrize("family", ["qwen2_moe"], indirect=True)
def test_a_shared_expert_gives_what_it_gives_on_hugging_face(family: Family) -> None:
    """vLLM's has the gate inside; it runs in the layer that it is handed down to."""
    here = LanguageModel(str(family.path), dtype=torch.float32, dispatch=True)
    near = here.model.layers[0].mlp
    with torch.no_grad(), here.trace(PROMPT):
        inner = near.shared_expert.output.save()
        gate = near.shared_expert_gate.output.save()
    engine = family.engine
    near = engine.layers[0].mlp
    with engine.trace(PROMPT):
        score = near.shared_expert_gate.output[0].save()
        found = near.shared_expert.output.save()
    assert_same([score, found], [gate[-len(score) :], (gate.sigmoid() * inner)[-len(found) :]])
    with pytest.raises(NotServedError, match=r"is the module model\.model\.layers\.0\.mlp\.sh"):
        with engine.trace(PROMPT):
            near.experts._shared_experts._layer.output.save()


@pytest.mark.parametrize("name", standard_blocks.BLOCKS)
def test_one_text_in_standard_names(name: str, family: Family) -> None:
    local = LanguageModel(
        str(family.path), dtype=torch.float32, attn_implementation="eager", dispatch=True
    )
    run = standard_blocks.BLOCKS[name]
    with torch.no_grad():
        wanted = run(local, standard_blocks.on_language_model(local))
    model = family.engine.model
    assert_same(run(model, standard_blocks.on_vllm(model)), wanted, name)
    family.engine.assert_idle()


@pytest.mark.parametrize("family", ["qwen2_moe"], indirect=True)
@pytest.mark.parametrize("on_two", [False, True], ids=["one rank", "two ranks"])
def test_weights_of_experts_are_edited(on_two: bool, family: Family) -> None:
    """The last ones: what both engines hold is not the checkpoint any more."""
    from transformers import AutoModelForCausalLM

    engine = family.engine if on_two else family.one
    hub: Any = AutoModelForCausalLM.from_pretrained(family.path, dtype=torch.float32).eval()
    hub.requires_grad_(False)
    there, here = engine.model.model.layers[1].mlp, hub.model.layers[1].mlp
    experts = there.experts.routed_experts
    assert torch.equal(experts.w13_weight.clone(), here.experts.gate_up_proj)
    experts.w13_weight[2, 70] = 0.4
    here.experts.gate_up_proj[2, 70] = 0.4
    experts.w2_weight[:, :, 40] *= 3
    here.experts.down_proj[:, :, 40] *= 3
    there.gate.weight[1] += 0.2
    here.gate.weight[1] += 0.2
    assert torch.equal(experts.w2_weight.clone(), here.experts.down_proj)
    assert_logits_as(hub, engine, PROMPT)
    with (
        pytest.raises(NotSupportedError, match="repacked"),
        engine.model.trace(PROMPT, max_tokens=1),
    ):
        size = experts.w2_weight.norm().save()


def test_experts_that_are_not_split_are_refused_before_an_engine_starts(
    tiny_llama_path: Path,
) -> None:
    with pytest.raises(ConfigurationError, match="enable_expert_parallel"):
        VLLM(str(tiny_llama_path), tensor_parallel_size=2, enable_expert_parallel=True)


def test_a_step_that_fails_on_every_rank_is_computed_again(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """GPT-2 looks up its positions in a table that every rank has."""
    path = make_tiny("gpt2", tmp_path / "gpt2", smollm2_path)
    model = VLLM(str(path), tensor_parallel_size=2, dtype="float32", enforce_eager=True)
    with contextlib.closing(model):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            before = model.logits.save()
        with pytest.raises(BlockError, match="The model failed beside this block"):
            with model.trace(temperature=0.0, max_tokens=3) as tracer:
                with tracer.invoke(PROMPT):
                    model.transformer.wpe.input[:] = 10**6
                with tracer.invoke(PROMPT):
                    pass
        assert model.request_counts() == [0, 0]
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            after = model.logits.save()
        assert torch.equal(after, before)
