"""What the scheduler does to a request never shows in what its block sees, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from engine.arrivals import Plan, arriving
from engine.backends import GAUGES
from engine.compare import assert_same
from nnsight_pp import VLLM, ConfigurationError

STEPS = 70
PROMPTS = ["one two three four", "a small river runs", "the last of the three prompts is longer"]


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[VLLM]:
    """A two-stage engine whose KV cache holds two of three requests to their end.

    It schedules in this process, so that runs are alike.
    """
    model = VLLM(
        str(tiny_llama_path),
        pipeline_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        block_size=32,
        num_gpu_blocks_override=7,
        kv_cache_memory_bytes=64 << 20,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        model.dispatch()
    try:
        yield model
    finally:
        model.close()


def follow(model: VLLM, prompts: list[str]) -> list[list[Any]]:
    """Return, for each prompt, an early and a late value and the logits of every step."""
    layers = list(model.model.layers)
    found: list[list[Any]] = [[] for _ in prompts]
    with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        for mine, prompt in zip(found, prompts, strict=True):
            with tracer.invoke(prompt):
                for step in tracer.iter[:STEPS]:
                    early = layers[0].mlp.output
                    layers[-1].mlp.output[-1] += 0.1 * early[-1]
                    mine.append((early.shape[0], early[-1], model.logits[0, :50]))
    return found


def test_preempted_requests_see_each_step_once(model: VLLM) -> None:
    together = follow(model, PROMPTS)
    assert all(rank["resumed"] > 0 for rank in model.statistics()), "nothing was preempted"
    alone = [follow(model, [prompt])[0] for prompt in PROMPTS]
    for mine, wanted in zip(together, alone, strict=True):
        assert [rows for rows, _, _ in mine] == [rows for rows, _, _ in wanted]
        assert_same([step[1:] for step in mine], [step[1:] for step in wanted], "steps")
    assert model.request_counts() == [0, 0]


def test_a_preempted_request_whose_edits_are_in_its_cache_is_refused(model: VLLM) -> None:
    layers = list(model.model.layers)
    with pytest.raises(ConfigurationError, match=r"(?s)preempted after.*kv_cache_memory_bytes"):
        with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    layers[0].mlp.output[-1] += 0.1  # the prompt's step alone
                    out = tracer.result.save()
    assert model.request_counts() == [0, 0]
    with model.trace(PROMPTS[0], temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        layers[0].mlp.output[-1] += 0.1
        out = tracer.result.save()
    assert len(out.outputs[0].token_ids) == STEPS


def test_requests_that_share_names_and_lose_one_another_are_refused(model: VLLM) -> None:
    """The cache holds two of three to their end, so one is preempted."""
    layers = list(model.model.layers)
    with pytest.raises(ConfigurationError, match=r"(?s)preempted.*kv_cache_memory_bytes"):
        with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
            rows = {}
            for number, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt):
                    for step in tracer.iter[:STEPS]:
                        early = layers[0].mlp.output
                        rows[number, step] = len(rows)
                        layers[-1].mlp.output[-1] += early[-1]
    assert model.request_counts() == [0, 0]


def test_a_steered_prompt_leaves_nothing_in_the_prefix_cache(model: VLLM) -> None:
    layers = list(model.model.layers)
    prompt = "the same words again and again " * 16
    fresh = model.generate(prompt, temperature=0.0, max_tokens=4, ignore_eos=True)[0]
    cached = model.generate(prompt, temperature=0.0, max_tokens=4, ignore_eos=True)[0]
    assert cached.num_cached_tokens > 0, "plain requests do use the cache"
    rows = []
    for _ in range(2):
        with model.trace(prompt, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            for _step in tracer.iter[:4]:
                layers[0].output[0][:] += 5.0
            out = tracer.result.save()
        rows.append(out.outputs[0].token_ids)
        with model.trace(prompt, temperature=0.0, max_tokens=1):
            slab = layers[-1].mlp.output.save()
        assert slab.shape[0] == len(fresh.prompt_token_ids), "the whole prompt, not its rest"
        again = model.generate(prompt, temperature=0.0, max_tokens=4, ignore_eos=True)[0]
        assert again.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert rows[0] == rows[1]
    assert rows[0] != fresh.outputs[0].token_ids


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("least", [0, 6])
def test_a_loop_sees_the_rounds_up_to_a_stop_string(model: VLLM, include: bool, least: int) -> None:
    options = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    whole = model.generate(PROMPTS[0], **options)[0].outputs[0]
    texts = [model.tokenizer.decode([one]) for one in whole.token_ids]
    # Two tokens make it, of which the second is not its own.
    string = (texts[3] + texts[4])[1:]
    options |= {"stop": [string], "include_stop_str_in_output": include, "min_tokens": least}
    wanted = model.generate(PROMPTS[0], **options)[0].outputs[0]
    assert string in whole.text
    with pytest.warns(UserWarning, match="never reached"):
        with model.trace(PROMPTS[0], **options) as tracer:
            early, sampled = [].save(), [].save()
            for _ in tracer.iter[:]:
                early.append(model.model.layers[0].mlp.output.shape[0])
                sampled.append(int(model.samples))
    assert sampled == list(wanted.token_ids)
    assert early == [early[0]] + [1] * (len(sampled) - 1)
    with model.trace(PROMPTS[0], **options) as tracer:
        out = tracer.result.save()
    assert out.outputs[0].text == wanted.text
    assert out.outputs[0].finish_reason == wanted.finish_reason
    assert out.outputs[0].stop_reason == wanted.stop_reason
    assert least or wanted.finish_reason == "stop"


def test_each_sequence_of_a_prompt_has_a_block(model: VLLM) -> None:
    layers = list(model.model.layers)
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 4, "ignore_eos": True, "n": 3}
    prompt = "the same words again and again " * 8
    wanted = model.generate(prompt, **options)[0].outputs
    assert len({tuple(one.token_ids) for one in wanted}) == 3
    drawn: list[Any] = []
    with model.trace(prompt, **options) as tracer:
        sampled = [].save()
        drawn.append(float(torch.rand(())))
        slab = layers[0].mlp.output.shape[0]
        rows = torch.tensor(slab).save()
        for _ in tracer.iter[:4]:
            late = layers[-1].mlp.output
            sampled.append(int(model.samples))
        out = tracer.result.save()
    assert sampled == [list(one.token_ids) for one in wanted]
    assert [list(one.token_ids) for one in out.outputs] == sampled
    assert [int(one) for one in rows] == [len(out.prompt_token_ids)] * 3
    assert len(set(drawn)) == 3, "each draws its own numbers"
    assert model.request_counts() == [0, 0]


def test_an_error_in_one_sequence_is_raised(model: VLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        with model.trace(PROMPTS[0], n=3, temperature=1.0, seed=5, max_tokens=2):
            first = int(model.samples)
            1 / 0
    assert model.request_counts() == [0, 0]


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
@pytest.mark.parametrize(
    "choice", [{"choice": ["red", "green", "blue"]}, {"regex": r"[0-9]{3}-[a-f]{2}"}]
)
def test_structured_output_is_the_engines_own(model: VLLM, choice: dict[str, Any]) -> None:
    options = {
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 12,
        "structured_outputs": StructuredOutputsParams(**choice),
    }
    wanted = model.generate(PROMPTS[0], **options)[0].outputs[0]
    with pytest.warns(UserWarning, match="never reached"):
        with model.trace(PROMPTS[0], **options) as tracer:
            sampled = [].save()
            for _ in tracer.iter[:]:
                model.model.layers[0].mlp.output[-1] += 0.0
                sampled.append(int(model.samples))
    assert sampled == list(wanted.token_ids)
    assert wanted.text


def test_stop_ids_are_right(model: VLLM) -> None:
    ids = model.generate(PROMPTS[0], temperature=0.0, max_tokens=6)[0].outputs[0].token_ids
    stop = ids[3]
    with pytest.warns(UserWarning, match="never reached"):
        with model.trace(
            PROMPTS[0], temperature=0.0, max_tokens=6, stop_token_ids=[stop]
        ) as tracer:
            seen = [].save()
            for _ in tracer.iter[:]:
                seen.append(int(model.samples))
    assert seen == list(ids[: list(ids).index(stop) + 1])


def test_min_tokens_and_seeded_sampling_are_the_engines_own(model: VLLM) -> None:
    options = {"temperature": 1.0, "seed": 7, "max_tokens": 5, "min_tokens": 5}
    plain = model.generate(PROMPTS[1], **options)[0].outputs[0].token_ids
    with model.trace(PROMPTS[1], **options) as tracer:
        sampled = [].save()
        for _ in tracer.iter[:5]:
            sampled.append(int(model.samples))
    assert sampled == list(plain)


def test_stop_ids_do_not_count_below_min_tokens(model: VLLM) -> None:
    ids = model.generate(PROMPTS[0], temperature=0.0, max_tokens=6)[0].outputs[0].token_ids
    options = {"temperature": 0.0, "max_tokens": 12, "stop_token_ids": list(ids[:6])}
    wanted = model.generate(PROMPTS[0], **options, min_tokens=4)[0].outputs[0]
    assert len(wanted.token_ids) >= 4
    assert not set(wanted.token_ids[:4]) & set(ids[:6])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it may be the last step, or not
        with model.trace(PROMPTS[0], **options, min_tokens=4) as tracer:
            sampled, early = [].save(), [].save()
            for _ in tracer.iter[:]:
                early.append(model.model.layers[0].mlp.output.shape[0])
                sampled.append(int(model.samples))
    assert sampled == list(wanted.token_ids)
    assert len(early) == len(sampled)


LENGTHS = [14, 5, 9]


def follow_to(model: VLLM, which: list[int]) -> list[list[Any]]:
    """Return what `follow` does of each of `PROMPTS` in ``which``, to an end of its own."""
    layers = list(model.model.layers)
    found: list[list[Any]] = [[] for _ in which]
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for mine, number in zip(found, which, strict=True):
            with tracer.invoke(PROMPTS[number], max_tokens=LENGTHS[number]):
                for step in tracer.iter[: LENGTHS[number]]:
                    early = layers[0].mlp.output
                    layers[-1].mlp.output[-1] += 0.1 * early[-1]
                    late = layers[-1].mlp.output[-1].clone()
                    mine.append((early[-1], late, model.logits[0, :50], int(model.samples)))
    return found


@pytest.fixture(scope="module")
def alone(model: VLLM) -> list[list[Any]]:
    """What each of the requests of `follow_to` sees when nobody else is there."""
    return [follow_to(model, [number])[0] for number in range(3)]


PLAIN = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("delays", [[0, 3, 5], [4, 1, 0], [0, 1, 2]])
def test_requests_that_come_and_go_see_what_they_see_alone(
    model: VLLM, alone: list[list[Any]], delays: list[int]
) -> None:
    plain = [
        (0, PROMPTS[1], {**PLAIN, "max_tokens": 11}),
        (4, PROMPTS[0], {**PLAIN, "max_tokens": 3}),
    ]
    plan = Plan(delays, plain)
    with arriving(model, plan):
        together = follow_to(model, [0, 1, 2])
    assert plan.most_in_flight == 2, "both stages were busy at a time"
    for mine, wanted in zip(together, alone, strict=True):
        assert_same(mine, wanted, "steps")
    for place, (_, prompt, options) in enumerate(plain):
        (wanted,) = model.generate(prompt, **options)
        assert plan.outputs[place].outputs[0].token_ids == wanted.outputs[0].token_ids
    assert_idle(model)


def test_requests_that_are_aborted_leave_the_others_alone(
    model: VLLM, alone: list[list[Any]]
) -> None:
    plan = Plan(
        [0, 1, 2],
        [(1, PROMPTS[1], {**PLAIN, "max_tokens": 20}), (3, PROMPTS[0], {**PLAIN, "max_tokens": 8})],
        aborted={0: 9},
        aborted_plain={0: 6},
    )
    with arriving(model, plan), pytest.warns(UserWarning, match="never reached"):
        together = follow_to(model, [0, 1, 2])
    assert [len(mine) for mine in together[1:]] == LENGTHS[1:]
    assert 1 <= len(together[0]) < LENGTHS[0]
    for mine, wanted in zip(together, alone, strict=True):
        assert_same(mine, wanted[: len(mine)], "steps")
    assert plan.outputs[0].outputs[0].finish_reason == "abort"
    assert plan.outputs[1].outputs[0].finish_reason == "length"
    assert_idle(model)


def test_a_step_of_two_kinds_of_blocks_that_fail_and_stop_leaves_the_others_alone(
    model: VLLM, alone: list[list[Any]]
) -> None:
    layers = list(model.model.layers)
    seen: list[Any] = []
    with arriving(model, Plan([0, 1, 2])):
        with model.trace(temperature=0.0, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPTS[1], max_tokens=20):
                for step in tracer.iter[:20]:
                    if step == 4:
                        tracer.stop()
                    late = layers[-1].mlp.output
            with tracer.invoke(PROMPTS[0], max_tokens=LENGTHS[0]):
                for step in tracer.iter[: LENGTHS[0]]:
                    early = layers[0].mlp.output
                    layers[-1].mlp.output[-1] += 0.1 * early[-1]
                    late = layers[-1].mlp.output[-1].clone()
                    seen.append((early[-1], late, model.logits[0, :50], int(model.samples)))
            with tracer.invoke(PROMPTS[2], max_tokens=6):
                layers[1].mlp.output[:] += 1.0
    assert_same(seen, alone[0], "steps")
    assert tracer.statistics["ends"][0].num_tokens == 5
    assert_idle(model)


def assert_idle(model: VLLM) -> None:
    for rank in model.statistics():
        assert {name: rank[name] for name in GAUGES if rank.get(name)} == {}


def test_asynchronous_scheduling_is_off_or_refused(tiny_llama_path: Path) -> None:
    path = str(tiny_llama_path)
    VLLM(path, async_scheduling=False, enforce_eager=True, max_model_len=64)
    with pytest.raises(
        ConfigurationError, match=r"(?s)async_scheduling=True cannot.*Leave the arg"
    ):
        VLLM(path, async_scheduling=True)


def test_an_interrupted_run_leaves_nothing_behind(
    model: VLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = list(model.model.layers)
    engine = model._llm.llm_engine
    step, calls = engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with model.trace(PROMPTS[0], temperature=0.0, max_tokens=60, ignore_eos=True) as tracer:
            for _ in tracer.iter[:60]:
                layers[0].mlp.output
                late = layers[-1].mlp.output
    monkeypatch.undo()
    assert model.request_counts() == [0, 0]
    with model.trace(PROMPTS[0], temperature=0.0, max_tokens=1):
        again = layers[-1].mlp.output.save()
    assert torch.isfinite(again).all()
