"""A prompt with a block is never cut, however small the steps are; everybody else's is.

The scheduler runs in this process, so that a test sees what each step holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.compare import assert_same
from nnsight_pp import VLLM, ConfigurationError

BUDGET = 16
LONG = "many words stand here in a row and then some more " * 12
OTHER = "somebody else has a long prompt of another kind, too " * 10


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[VLLM]:
    """A two-stage engine with steps of 16 tokens, of which one prompt gets 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        model = VLLM(
            str(tiny_llama_path),
            pipeline_parallel_size=2,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_batched_tokens=BUDGET,
            long_prefill_token_threshold=8,
            kv_cache_memory_bytes=64 << 20,
            dispatch=True,
        )
    try:
        yield model
    finally:
        model.close()


@pytest.fixture
def steps(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """How many tokens each request had in each step that the test runs, by its vLLM id."""
    assert model._llm is not None
    scheduler = model._llm.llm_engine.engine_core.engine_core.scheduler
    schedule, found = scheduler.schedule, []

    def noted(*args: Any) -> Any:
        output = schedule(*args)
        if output.num_scheduled_tokens:
            found.append(dict(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    return found


def ids_of(model: VLLM, text: str) -> list[int]:
    return model.tokenizer(text).input_ids


def reference(path: Path, prompt: str | list[int], tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Return what layer 2's MLP gives for the whole prompt, and the greedy continuation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if isinstance(prompt, str):
        prompt = AutoTokenizer.from_pretrained(path)(prompt).input_ids
    ids = torch.tensor([prompt])
    seen: list[torch.Tensor] = []
    model.model.layers[2].mlp.register_forward_hook(lambda *given: seen.append(given[-1][0]))
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=2
        )
    return seen[0], out[0, ids.shape[1] :].tolist()


def test_a_traced_prompt_is_whole_and_the_others_are_cut(
    model: VLLM, steps: list[dict[str, int]], tiny_llama_path: Path
) -> None:
    layers = list(model.model.layers)
    with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        with tracer.invoke(OTHER):
            pass
        with tracer.invoke(LONG):
            slab = layers[2].mlp.output.save()
            out = tracer.result.save()
        with tracer.invoke(OTHER + "once more"):
            pass
        with tracer.invoke(LONG + "and again"):
            early = layers[0].mlp.output
            layers[3].mlp.output[-1] += early[0]
            second = layers[3].mlp.output.save()
            answer = tracer.result.save()
    wanted, tokens = reference(tiny_llama_path, LONG, 4)
    assert_same(slab, wanted, "slab")
    assert list(out.outputs[0].token_ids) == tokens
    length, longer = len(ids_of(model, LONG)), len(ids_of(model, LONG + "and again"))
    assert second.shape[0] == longer
    assert len(answer.outputs[0].token_ids) == 4
    found = sorted(count for step in steps for count in step.values() if count > 1)
    assert found[-2:] == [length, longer], "both traced prompts ran in one step"
    assert max(found[:-2]) <= 8, "what else ran was cut as it was told to be"
    assert sum(found[:-2]) >= 2 * len(ids_of(model, OTHER)) - 20
    for step in steps:
        whole = [count for count in step.values() if count in (length, longer)]
        assert len(whole) <= 1
        assert sum(step.values()) - sum(whole) <= BUDGET
    assert model.request_counts() == [0, 0]


def test_a_prompt_of_the_full_length_goes_on_beside_others(
    model: VLLM, steps: list[dict[str, int]]
) -> None:
    layers = list(model.model.layers)
    full = (ids_of(model, LONG) * 6)[:500]
    alone = model.generate({"prompt_token_ids": full}, temperature=0.0, max_tokens=4)[0]
    steps.clear()
    with model.trace(temperature=0.0, max_tokens=4) as tracer:
        for _ in range(3):
            with tracer.invoke(OTHER):
                pass
        with tracer.invoke(full):
            slab = layers[3].mlp.output.save()
            out = tracer.result.save()
    assert slab.shape[0] == 500
    assert out.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [count for step in steps for count in step.values() if count > BUDGET] == [500]
    assert model.request_counts() == [0, 0]


def test_blocks_that_share_a_name_begin_in_one_step(
    model: VLLM, steps: list[dict[str, int]]
) -> None:
    layers = list(model.model.layers)
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(LONG):
            clean = layers[1].mlp.output[-1]
        with tracer.invoke(LONG + "and again"):
            value = layers[2].mlp.output
            value[-1] = clean
            patched = value[-1].save()
    with model.trace(LONG, temperature=0.0, max_tokens=1):
        alone = layers[1].mlp.output[-1].save()
    assert_same(patched, alone, "patched")
    both = [len(ids_of(model, LONG)), len(ids_of(model, LONG + "and again"))]
    assert sorted(steps[0].values()) == sorted(both)


def test_untraced_answers_are_those_of_whole_prompts(model: VLLM, tiny_llama_path: Path) -> None:
    _, tokens = reference(tiny_llama_path, OTHER, 4)
    outs = model.generate([OTHER, LONG, OTHER], temperature=0.0, max_tokens=4, ignore_eos=True)
    assert list(outs[0].outputs[0].token_ids) == tokens
    assert list(outs[2].outputs[0].token_ids) == tokens


def test_a_shared_prompt_is_cached_for_the_others_and_whole_for_a_block(
    model: VLLM, tiny_llama_path: Path
) -> None:
    """Traced with a steering vector, then plain, then traced, and so again."""
    layers = list(model.model.layers)
    prompt = {"prompt_token_ids": ids_of(model, "One that is shared. " + LONG * 3)[:300]}
    wanted, tokens = reference(tiny_llama_path, prompt["prompt_token_ids"], 4)
    vector = torch.linspace(-4, 4, 128)
    steered = []
    for turn in range(2):
        with model.trace(prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            for _ in tracer.iter[:4]:
                layers[0].output[0][:] += vector
            out = tracer.result.save()
        steered.append(list(out.outputs[0].token_ids))
        plain = model.generate(prompt, temperature=0.0, max_tokens=4, ignore_eos=True)[0]
        assert list(plain.outputs[0].token_ids) == tokens
        assert plain.num_cached_tokens == (0 if turn == 0 else 256)
        with model.trace(prompt, temperature=0.0, max_tokens=1):
            slab = layers[2].mlp.output.save()
        assert_same(slab, wanted, "the whole prompt")
    assert steered[0] == steered[1] != tokens
    assert model.request_counts() == [0, 0]


def test_a_prompt_that_fits_in_no_step_is_refused(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = VLLM(
        str(tiny_llama_path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        max_num_scheduled_tokens=BUDGET,
        max_num_batched_tokens=BUDGET,
        kv_cache_memory_bytes=64 << 20,
    )
    layers = list(model.model.layers)
    random.seed(5)
    torch.manual_seed(5)
    wanted = (random.random(), torch.rand(1).item())
    random.seed(5)
    torch.manual_seed(5)
    try:
        model.dispatch()
        assert (random.random(), torch.rand(1).item()) == wanted, "an engine here seeds nobody else"
        with pytest.raises(ConfigurationError, match="max_num_scheduled_tokens"):
            with model.trace("many words " * 20, temperature=0.0, max_tokens=2):
                layers[0].mlp.output.save()
        with model.trace("two words", temperature=0.0, max_tokens=2):
            slab = layers[-1].mlp.output.save()
        assert slab.shape[0] > 1
        assert model.request_counts() == [0]
    finally:
        model.close()
