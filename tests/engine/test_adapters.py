"""LoRA requests: a block sees the values of its own request's adapter."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.lora.request import LoRARequest

from engine.compare import assert_same
from nnsight_pp import VLLM, NNsight, NotSupportedError

RANK, ALPHA = 4, 8
PROMPT, OTHER = "one two three four", "a small river runs"
TARGETS = {"q_proj": ("self_attn", 128, 128), "down_proj": ("mlp", 128, 256)}


@pytest.fixture(scope="module")
def plain(tiny_llama_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> Iterator[tuple[Path, Any]]:
    """A random adapter's folder, and the model with the adapter merged into its weights."""
    folder = tmp_path_factory.mktemp("adapter")
    merged = copy.deepcopy(plain)
    weights = {}
    generator = torch.Generator().manual_seed(5)
    for index, layer in enumerate(merged.model.layers):
        for name, (parent, size_out, size_in) in TARGETS.items():
            first = torch.randn(RANK, size_in, generator=generator) * 0.1
            second = torch.randn(size_out, RANK, generator=generator) * 0.1
            path = f"base_model.model.model.layers.{index}.{parent}.{name}"
            weights[f"{path}.lora_A.weight"], weights[f"{path}.lora_B.weight"] = first, second
            with torch.no_grad():
                getattr(getattr(layer, parent), name).weight += ALPHA / RANK * second @ first
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, merged


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[VLLM]:
    model = VLLM(
        str(tiny_llama_path),
        pipeline_parallel_size=2,
        dtype="float32",
        max_model_len=128,
        enable_lora=True,
        max_lora_rank=8,
        kv_cache_memory_bytes=64 << 20,
    )
    try:
        yield model
    finally:
        model.close()


def local_values(module: Any, path: Path, prompt: str) -> list[torch.Tensor]:
    model = NNsight(module)
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
    with torch.no_grad(), model.trace(ids):
        early = model.model.layers[0].mlp.output[0].save()
        late = model.model.layers[3].mlp.output[0].save()
        logits = model.lm_head.output[0, -1:].save()
    return [early, late, logits]


def test_values_include_the_adapter_of_their_own_request(
    model: VLLM, plain: Any, adapter: tuple[Path, Any], tiny_llama_path: Path
) -> None:
    folder, merged = adapter
    request = LoRARequest("random", 1, str(folder))
    layers = list(model.model.layers)
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT, lora_request=request):
            early_1 = layers[0].mlp.output.save()
            late_1 = layers[3].mlp.output.save()
            logits_1 = model.logits.save()
        with tracer.invoke(OTHER):
            early_2 = layers[0].mlp.output.save()
            late_2 = layers[3].mlp.output.save()
            logits_2 = model.logits.save()
    wanted_1 = local_values(merged, tiny_llama_path, PROMPT)
    wanted_2 = local_values(plain, tiny_llama_path, OTHER)
    assert_same([early_1, late_1, logits_1], wanted_1, "with the adapter")
    assert_same([early_2, late_2, logits_2], wanted_2, "without")
    without = local_values(plain, tiny_llama_path, PROMPT)
    assert (wanted_1[2] - without[2]).abs().max() > 0.1, "the adapter changes nothing"
    with model.trace(PROMPT, lora_request=request, temperature=0.0, max_tokens=3) as tracer:
        layers[3].mlp.output[-1] += 1.0
        out = tracer.result.save()
    assert out.lora_request is not None
    assert model.request_counts() == [0, 0]


def test_one_step_holds_requests_with_an_adapter_and_without(
    model: VLLM, plain: Any, adapter: tuple[Path, Any], tiny_llama_path: Path
) -> None:
    """A name shared between the invokes keeps their requests in the same steps."""
    folder, merged = adapter
    request = LoRARequest("random", 1, str(folder))
    layers = list(model.model.layers)
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT, lora_request=request):
            shared = layers[0].mlp.output
            early_1 = shared.save()
            late_1 = layers[3].mlp.output.save()
            logits_1 = model.logits.save()
        with tracer.invoke(OTHER):
            early_2 = layers[0].mlp.output.save()
            both = (early_2[0] + shared[0]).save()
            late_2 = layers[3].mlp.output.save()
            logits_2 = model.logits.save()
    wanted_1 = local_values(merged, tiny_llama_path, PROMPT)
    wanted_2 = local_values(plain, tiny_llama_path, OTHER)
    assert_same([early_1, late_1, logits_1], wanted_1, "with the adapter")
    assert_same([early_2, late_2, logits_2], wanted_2, "without")
    assert_same(both, wanted_1[0][0] + wanted_2[0][0], "of both")


def test_a_call_of_what_an_adapter_may_change_is_refused(model: VLLM) -> None:
    layers = list(model.model.layers)
    with pytest.raises(NotSupportedError, match="LoRA"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            h = layers[1].output
            model.logits_processor(model.lm_head, model.model.norm(h[0])).save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        normed = model.model.norm(layers[1].output[0]).save()
    assert normed.shape[1] == 128
