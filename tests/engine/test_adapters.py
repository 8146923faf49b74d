"""LoRA requests: a block sees the values of its own request's adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest

from engine.compare import assert_same
from engine.lora_models import plain_model, with_random_adapter
from nnsight_pp import VLLM, NNsight, NotSupportedError

PROMPT, OTHER = "one two three four", "a small river runs"
TARGETS = {"q_proj": "self_attn", "down_proj": "mlp"}


@pytest.fixture(scope="module")
def plain(tiny_llama_path: Path) -> Any:
    return plain_model(tiny_llama_path)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> tuple[Path, Any]:
    """A random adapter's folder, and the model with the adapter merged into its weights."""
    folder = tmp_path_factory.mktemp("adapter")
    return folder, with_random_adapter(plain, folder, TARGETS, alpha=8, seed=5)


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[VLLM]:
    model = VLLM(
        str(tiny_llama_path),
        pipeline_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
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


@pytest.fixture(scope="module")
def wanted(
    plain: Any, adapter: tuple[Path, Any], tiny_llama_path: Path
) -> dict[str, list[torch.Tensor]]:
    """What this process gives: the adapter is for the first prompt only."""
    return {
        PROMPT: local_values(adapter[1], tiny_llama_path, PROMPT),
        OTHER: local_values(plain, tiny_llama_path, OTHER),
    }


def test_values_include_the_adapter_of_their_own_request(
    model: VLLM,
    plain: Any,
    adapter: tuple[Path, Any],
    wanted: dict[str, list[torch.Tensor]],
    tiny_llama_path: Path,
) -> None:
    folder, _ = adapter
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
    assert_same([early_1, late_1, logits_1], wanted[PROMPT], "with the adapter")
    assert_same([early_2, late_2, logits_2], wanted[OTHER], "without")
    without = local_values(plain, tiny_llama_path, PROMPT)
    assert (wanted[PROMPT][2] - without[2]).abs().max() > 0.1, "the adapter changes nothing"
    with model.trace(PROMPT, lora_request=request, temperature=0.0, max_tokens=3) as tracer:
        layers[3].mlp.output[-1] += 1.0
        out = tracer.result.save()
    assert out.lora_request is not None
    assert model.request_counts() == [0, 0]


def test_one_step_holds_requests_with_an_adapter_and_without(
    model: VLLM, adapter: tuple[Path, Any], wanted: dict[str, list[torch.Tensor]]
) -> None:
    """A name shared between the invokes keeps their requests in the same steps."""
    folder, _ = adapter
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
    assert_same([early_1, late_1, logits_1], wanted[PROMPT], "with the adapter")
    assert_same([early_2, late_2, logits_2], wanted[OTHER], "without")
    assert_same(both, wanted[PROMPT][0][0] + wanted[OTHER][0][0], "of both")


def test_a_call_of_what_an_adapter_may_change_is_refused(model: VLLM) -> None:
    layers = list(model.model.layers)
    with pytest.raises(NotSupportedError, match="LoRA"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            h = layers[1].output
            model.logits_processor(model.lm_head, model.model.norm(h[0])).save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        normed = model.model.norm(layers[1].output[0]).save()
    assert normed.shape[1] == 128
