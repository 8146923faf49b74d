"""On an engine that compiles, steps with a block run eagerly and give what they give elsewhere.

The table's blocks name 30 layers. Here they run on a random model of six, five names to a layer, so
that compiling takes seconds: layers 0 to 14 of a block are the first three, on the first of two
stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends import LONGER, PROMPT, SHORT, Engine, Local
from engine.table import assert_block_same
from fakes.models import kept_folder, make_tiny_llama
from nnsight_pp.engines.vllm.prompts import sampling_params

NUM_NAMES = 30
# Those that ask for neighbouring layers in turn would ask for one layer twice here.
NAMES = (
    "read_on_every_stage",
    "add_a_vector_on_the_first_stage",
    "early_value_into_a_late_layer_in_the_same_step",
    "late_value_into_an_early_layer_at_the_next_step",
    "force_an_earlier_value_between_a_read_and_a_write",
    "a_copy_taken_before_the_edit_is_used_on_the_other_stage",
    "a_remote_value_edited_in_place_and_then_used",
    "a_branch_on_a_late_value_before_the_next_step",
    "one_chosen_step",
    "steering_at_every_step",
    "an_output_replaced_by_a_remote_value",
    "inputs_read_and_replaced",
    "torch_functions_on_remote_values",
    "a_park_inside_torch_on_a_later_value",
    "logits_changed_before_sampling",
    "a_logit_lens_on_every_layer",
    "calls_used_on_other_stages",
    "weights_of_every_stage",
    "modules_skipped_at_every_step_with_values_of_other_stages",
)
STAGES = (1, 2)
# What the blocks expect of a row.
WIDTH = {"hidden_size": 576, "num_attention_heads": 18, "num_key_value_heads": 6}


@pytest.fixture(scope="module")
def path(smollm2_path: Path) -> Path:
    return kept_folder("six-layers", smollm2_path, make_tiny_llama, num_hidden_layers=6, **WIDTH)


def named(backend: Any) -> Any:
    """Give each of ``backend``'s layers five names."""
    each = NUM_NAMES // len(backend.layers)
    backend.layers = [layer for layer in backend.layers for _ in range(each)]
    return backend


@pytest.fixture(scope="module")
def six(path: Path) -> Any:
    return named(Local(str(path)))


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    engine = named(Engine(str(path), request.param, in_process=True, enforce_eager=False))
    try:
        yield engine
    finally:
        engine.close()


on_engines = pytest.mark.parametrize(
    "engine", STAGES, indirect=True, ids=lambda n: f"vllm-{n}", scope="module"
)


@on_engines
@pytest.mark.parametrize("name", NAMES)
def test_block(name: str, engine: Engine, six: Local) -> None:
    assert_block_same(name, engine, six)


@on_engines
def test_untraced_steps_run_compiled_and_see_none_of_us(engine: Engine) -> None:
    """What the model gives without a block is what it gave before any, to the last bit."""
    model, layers = engine.model, engine.layers
    options = {"temperature": 0.0, "max_tokens": 6, "logprobs": 5}

    def plain() -> list[Any]:
        out = model.generate([PROMPT, LONGER], **options)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in out]

    before = plain()
    with model.trace(PROMPT, temperature=0.0, max_tokens=6):
        slab = layers[20].mlp.output.save()
    assert slab.shape[0] > 1
    assert plain() == before


@on_engines
def test_requests_beside_a_block_answer_as_they_do_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layers = engine.model, engine.layers
    options = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    others = [PROMPT, SHORT, LONGER]
    alone = [list(model.generate(one, **options)[0].outputs[0].token_ids) for one in others]
    generate, beside = model._llm.generate, []

    def with_others(
        prompts: list[Any], params: list[Any], *, lora_request: list[Any], **rest: Any
    ) -> list[Any]:
        plain = [sampling_params(options, None) for _ in others]
        adapters = [*lora_request, *(None for _ in others)]
        found = generate([*prompts, *others], [*params, *plain], lora_request=adapters, **rest)
        beside.append([list(one.outputs[0].token_ids) for one in found[len(prompts) :]])
        return found[: len(prompts)]

    monkeypatch.setattr(model._llm, "generate", with_others)
    for steps in (1, 4, 10):
        with model.trace(PROMPT, **{**options, "max_tokens": steps}) as tracer:
            for _ in tracer.iter[:steps]:
                layers[3].mlp.output[:] = 5
                layers[22].mlp.output[:] += 10
            out = tracer.result.save()
        assert list(out.outputs[0].token_ids) != alone[0][:steps]
    assert beside == [alone] * 3


@on_engines
def test_nothing_is_compiled_once_the_engine_is_up(engine: Engine) -> None:
    """With one stage the rank is this process, whose counters can be looked at."""
    if len(engine.model.request_counts()) > 1:
        return
    from torch._dynamo.utils import counters

    before = dict(counters["stats"])
    assert before["unique_graphs"] > 0
    model, layers = engine.model, engine.layers
    for prompt in (SHORT, PROMPT, LONGER):
        with model.trace(prompt, temperature=0.0, max_tokens=3) as tracer:
            for _ in tracer.iter[:3]:
                layers[0].mlp.act_fn.output[:] += 1
                late = layers[22].mlp(layers[3].mlp.output)
                layers[25].mlp.output[:] += late
        model.generate([prompt] * 2, temperature=0.0, max_tokens=2)
    assert dict(counters["stats"]) == before
