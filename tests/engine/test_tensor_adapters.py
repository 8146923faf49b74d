"""LoRA requests and compiled steps on two tensor-parallel ranks, against Hugging Face's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest

from engine.compare import assert_same
from engine.lora_models import RANK, plain_model, with_random_adapter
from nnsight_pp import VLLM, NNsight
from nnsight_pp.engines.vllm import client
from nnsight_pp.engines.vllm.batch import Batch

PROMPT, OTHER = "one two three four", "a small river runs"
HEAD = 32
# What an adapter is added to: columns of a fused layer, and both row-parallel layers.
TARGETS = {"q_proj": "self_attn", "o_proj": "self_attn", "up_proj": "mlp", "down_proj": "mlp"}
SECOND_TARGETS = {"k_proj": "self_attn", "v_proj": "self_attn", "down_proj": "mlp"}
STEPS = 4


@pytest.fixture(scope="module")
def plain(tiny_llama_path: Path) -> Any:
    return plain_model(tiny_llama_path)


@pytest.fixture(scope="module")
def adapted(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoRARequest, Any]:
    """A request for a random adapter, and the model with the adapter in its weights."""
    folder = tmp_path_factory.mktemp("adapter")
    merged = with_random_adapter(plain, folder, TARGETS, alpha=RANK, seed=7)
    return LoRARequest("random", 1, str(folder)), merged


@pytest.fixture(scope="module")
def second(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoRARequest, Any]:
    """The same for another adapter, of other layers."""
    folder = tmp_path_factory.mktemp("second")
    merged = with_random_adapter(plain, folder, SECOND_TARGETS, alpha=2 * RANK, seed=8)
    return LoRARequest("second", 2, str(folder)), merged


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[VLLM]:
    """An engine that compiles the steps without a block."""
    model = VLLM(
        str(tiny_llama_path),
        tensor_parallel_size=2,
        dtype="float32",
        max_model_len=128,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        kv_cache_memory_bytes=64 << 20,
    )
    try:
        yield model
    finally:
        model.close()


def here(module: Any, path: Path, prompt: str, *, is_cut: bool) -> list[torch.Tensor]:
    """Return the values below by the model of this process."""
    model = NNsight(module)
    near, far = model.model.layers[0], model.model.layers[3]
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
    with torch.no_grad(), model.trace(ids):
        query = near.self_attn.q_proj.output[0].save()
        if is_cut:
            near.self_attn.o_proj.input[:, :, -HEAD:] = 0
        heads = near.self_attn.o_proj.input[0].save()
        mixed = near.self_attn.o_proj.output[0].save()
        inner = far.mlp.down_proj.input[0].save()
        late = far.mlp.output[0].save()
        logits = model.lm_head.output[0, -1:].save()
    return [query, heads, mixed, inner, late, logits]


def values(model: VLLM, is_cut: bool) -> Any:
    near, far = model.model.layers[0], model.model.layers[3]
    fused = near.self_attn.qkv_proj.output[0]
    query = fused[:, : fused.shape[-1] // 2]
    if is_cut:
        near.self_attn.o_proj.input[:, -HEAD:] = 0
    heads = near.self_attn.o_proj.input
    mixed = near.self_attn.o_proj.output[0]
    inner = far.mlp.down_proj.input
    return [query, heads, mixed, inner, far.mlp.output, model.logits]


@pytest.mark.parametrize("is_cut", [False, True], ids=["read", "a head zeroed"])
@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapter", "none"])
def test_values_of_a_request(
    is_adapted: bool,
    is_cut: bool,
    model: VLLM,
    plain: Any,
    adapted: tuple[LoRARequest, Any],
    tiny_llama_path: Path,
) -> None:
    request, merged = adapted
    options = {"lora_request": request} if is_adapted else {}
    with model.trace(PROMPT, temperature=0.0, max_tokens=1, **options):
        found = values(model, is_cut).save()
    wanted = here(merged if is_adapted else plain, tiny_llama_path, PROMPT, is_cut=is_cut)
    assert_same(found, wanted, "values")
    other = here(plain if is_adapted else merged, tiny_llama_path, PROMPT, is_cut=is_cut)
    assert (wanted[-1] - other[-1]).abs().max() > 0.1, "the adapter changes nothing"
    assert model.request_counts() == [0, 0]


def greedy(module: Any, path: Path, prompt: str) -> tuple[list[torch.Tensor], list[int]]:
    """Return the logits and the ids of a few steps by the model of this process."""
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
    logits = []
    with torch.no_grad():
        for _ in range(STEPS):
            logits.append(module(ids).logits[0, -1:])
            ids = torch.cat([ids, logits[-1].argmax(-1)[None]], 1)
    return logits, ids[0, -STEPS:].tolist()


def test_two_adapters_and_none_with_blocks_and_without_in_one_step(
    model: VLLM,
    plain: Any,
    adapted: tuple[LoRARequest, Any],
    second: tuple[LoRARequest, Any],
    tiny_llama_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that all blocks share keeps their requests in the same steps."""
    (first_request, first), (second_request, other) = adapted, second
    batches: list[Batch] = []

    def kept(*args: Any, **options: Any) -> Batch:
        batches.append(Batch(*args, **options))
        return batches[-1]

    monkeypatch.setattr(client, "Batch", kept)
    cut: list[Any] = []
    with_second: list[Any] = []
    with_none: list[Any] = []
    near = model.model.layers[0]
    with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT, lora_request=first_request):
            shared = near.self_attn.qkv_proj.output[0][:, :128].clone()
            cut += values(model, True)
        with tracer.invoke(OTHER, lora_request=second_request):
            pass
        with tracer.invoke(PROMPT, lora_request=second_request):
            early = (near.self_attn.qkv_proj.output[0][:, :128] - shared).save()
            with_second.append(model.logits)
            for _ in tracer.iter[1:STEPS]:
                with_second.append(model.logits)
        with tracer.invoke(OTHER):
            pass
        with tracer.invoke(PROMPT):
            apart = (near.self_attn.qkv_proj.output[0][:, :128] - shared).save()
            with_none.append(model.logits)
            for _ in tracer.iter[1:STEPS]:
                with_none.append(model.logits)
        with tracer.invoke(OTHER, lora_request=first_request):
            pass

    wanted = here(first, tiny_llama_path, PROMPT, is_cut=True)
    assert_same(cut, wanted, "the first adapter, a head zeroed")
    query = here(plain, tiny_llama_path, PROMPT, is_cut=False)[0]
    assert_same([early, apart], [query - wanted[0]] * 2, "beside it")
    by_itself = [greedy(module, tiny_llama_path, PROMPT)[0] for module in (other, plain)]
    assert_same([with_second, with_none], by_itself, "with a block")
    assert (by_itself[0][0] - by_itself[1][0]).abs().max() > 0.1, "the adapter changes nothing"
    (batch,) = batches
    found = [list(one.outputs[0].token_ids) for one in batch.outputs]
    untraced = [greedy(module, tiny_llama_path, OTHER)[1] for module in (other, plain, first)]
    assert [found[at] for at in (1, 3, 5)] == untraced
    assert len({tuple(one) for one in untraced}) == 3, "the adapters change nothing"
    assert model.request_counts() == [0, 0]


def test_untraced_steps_run_compiled_and_see_none_of_us(model: VLLM) -> None:
    """What the model gives without a block is what it gave before any, to the last bit."""
    far = model.model.layers[3]

    def answers() -> list[Any]:
        made = model.generate([PROMPT, OTHER], temperature=0.0, max_tokens=6, logprobs=5)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in made]

    before = answers()
    with model.trace(OTHER, temperature=0.0, max_tokens=4) as tracer:
        for _ in tracer.iter[:4]:
            far.self_attn.o_proj.input[:, :HEAD] = 5
            slab = far.mlp.act_fn.output.save()
    assert slab.shape == (1, 256)
    assert answers() == before
