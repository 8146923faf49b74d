"""Latent attention (MLA) on one rank and on two stages of two ranks each, against Hugging Face.

A random DeepSeek-V2 with feed-forward layers. vLLM's CPU backend has one kernel for latent
attention, of 512 + 64 numbers. It multiplies `kv_b_proj` into others when the model is loaded. Its
rotary kernel (vllm 0.32.0 layers/rotary_embedding/base.py:forward_cpu) turns a slice of the queries
wrongly, without tracing too, so such an engine is refused, and these use torch's own operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import PROMPT, Engine
from engine.compare import assert_same
from fakes.models import make_tiny
from nnsight_pp import VLLM, ConfigurationError, NotSupportedError

NATIVE = {"custom_ops": ["none"]}


@pytest.fixture(scope="module")
def path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("deepseek_v2", tmp_path_factory.mktemp("models") / "mla", smollm2_path)


@pytest.fixture(scope="module")
def hub(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[Engine]:
    with contextlib.closing(
        Engine(str(path), 1, in_process=True, compilation_config=NATIVE)
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def four(path: Path) -> Iterator[Engine]:
    with contextlib.closing(Engine(str(path), 2, tp=2, compilation_config=NATIVE)) as engine:
        yield engine


def values_of(engine: Engine) -> dict[str, Any]:
    """What each layer takes and gives in three steps, a head of the last one silenced."""
    first, last = engine.layers[0].self_attn, engine.layers[-1].self_attn
    found: Any = []
    with engine.trace(PROMPT, steps=3) as tracer:
        for _ in tracer.iter[:3]:
            early = [first.q_proj.output[0], first.o_proj.input, first.output]
            latent = last.kv_a_proj_with_mqa.output[0]
            queries = last.q_proj.output[0]
            last.o_proj.input[:, -32:] = 0
            found.append([*early, latent, queries, last.output + early[2], engine.model.logits])
    return {"steps": found}


def test_values_are_whole_on_every_shape(one: Engine, four: Engine) -> None:
    wanted = values_of(one)
    shapes = [list(value.shape) for value in wanted["steps"][0]]
    assert shapes[:4] == [[10, 4 * 96], [10, 128], [10, 128], [10, 576]]
    assert_same(values_of(four), wanted, "latent attention")
    four.assert_idle()


def logits_of(engine: Engine) -> torch.Tensor:
    logits: Any = None
    with engine.trace(PROMPT):
        logits = engine.model.logits.save()
    return logits[0]


def test_weights_are_edited_but_for_those_that_were_multiplied(
    one: Engine, four: Engine, hub: Any
) -> None:
    ids = one.tokenizer(PROMPT, return_tensors="pt").input_ids
    for engine in (one, four):
        torch.testing.assert_close(logits_of(engine), hub(ids).logits[0, -1], atol=1e-4, rtol=1e-4)
    own = hub.model.layers[0].self_attn
    own.q_proj.weight[200:210] *= 2
    own.kv_a_proj_with_mqa.weight[7] = 0.1
    for engine in (one, four):
        attn = engine.model.model.layers[0].self_attn
        attn.q_proj.weight[200:210] *= 2
        attn.kv_a_proj_with_mqa.weight[7] = 0.1
        with pytest.raises(NotSupportedError, match="has computed something of it"):
            attn.kv_b_proj.weight[3] = 0
        torch.testing.assert_close(logits_of(engine), hub(ids).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_an_engine_whose_kernel_would_turn_queries_wrongly_is_refused(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="latent attention"):
        VLLM(str(path), dtype="float32", enforce_eager=True, max_model_len=128)
