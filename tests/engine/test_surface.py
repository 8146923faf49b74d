"""The rest of the surface on two stages: what ends, skips, keeps and stores.

The engine's scheduler runs in this process, so that the requests of a trace always form the same
batches and neighbours can be compared to the last bit.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.backends import LONGER, PROMPT, SHORT, Engine
from nnsight_pp import (
    CacheError,
    NotServedError,
    NotSupportedError,
    OutOfOrderError,
    RowsError,
)
from nnsight_pp.engines.vllm.schedule import STOP_REASON

if TYPE_CHECKING:
    from engine.kept_engine import KeptEngine


@pytest.fixture(scope="module")
def engine(smollm2_path: Path, kept_engine: KeptEngine) -> Iterator[Engine]:
    with kept_engine.lent(smollm2_path, 2, in_process=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    yield
    engine.assert_idle()


# -------------------------------------------------------------------------------------- the stop


@pytest.mark.parametrize("layer", [3, 25])
def test_a_stop_ends_the_request_at_once_whatever_it_was_told(engine: Engine, layer: int) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(
        PROMPT, temperature=0.0, max_tokens=100, min_tokens=90, ignore_eos=True
    ) as tracer:
        rows = [].save()
        for step in tracer.iter[:]:
            rows.append(layers[layer].mlp.output.shape[0])
            if step == 2:
                tracer.stop()
    assert rows == [10, 1, 1]
    assert tracer.statistics["ends"] == [(3, "stop", STOP_REASON)]


def test_a_stop_before_any_value_costs_one_step(engine: Engine) -> None:
    with engine.model.trace(PROMPT, max_tokens=100, ignore_eos=True) as tracer:
        kept = "kept".save()
        tracer.stop()
    assert kept == "kept"
    assert tracer.statistics["ends"] == [(1, "stop", STOP_REASON)]


@pytest.mark.parametrize("layer", [3, 25])
def test_a_block_that_raises_ends_its_request_too(engine: Engine, layer: int) -> None:
    model, layers = engine.model, engine.layers
    tracer = model.trace(PROMPT, max_tokens=100, min_tokens=90, ignore_eos=True)
    with pytest.raises(ZeroDivisionError):
        with tracer:
            rows = layers[layer].mlp.output.shape[0]
            rows / 0
    assert tracer.statistics["ends"] == [(1, "stop", STOP_REASON)]


def test_a_stop_leaves_the_neighbours_alone(engine: Engine) -> None:
    model, layers = engine.model, engine.layers

    def beside(stops: bool) -> tuple[list[Any], Any]:
        with model.trace(temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            rows = [].save()
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[:4]:
                    rows.append(model.logits)
            with tracer.invoke(SHORT, max_tokens=4 if stops else 2):
                for step in tracer.iter[:]:
                    layers[20].mlp.output
                    if step == 1:
                        tracer.stop()
            with tracer.invoke(LONGER):
                out = tracer.result.save()
        assert [end.num_tokens for end in tracer.statistics["ends"]] == [4, 2, 4]
        return rows, out

    calm, calm_out = beside(stops=False)
    rows, out = beside(stops=True)
    assert all(torch.equal(one, other) for one, other in zip(calm, rows, strict=True))
    assert out.outputs[0].token_ids == calm_out.outputs[0].token_ids


# -------------------------------------------------------------------------------------- the skip


def line_of(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


@pytest.mark.parametrize("layer", [6, 21])
def test_what_is_inside_a_skipped_module_is_never_reached(engine: Engine, layer: int) -> None:
    layers = engine.layers
    with pytest.raises(
        OutOfOrderError, match=rf"layers\.{layer}\.mlp\.down_proj\.output#0"
    ) as caught:
        with engine.model.trace(PROMPT, max_tokens=2):
            layers[layer].mlp.skip(layers[layer].mlp.input)
            inner = layers[layer].mlp.down_proj.output.save()
    assert line_of(caught.value).startswith("inner =")


@pytest.mark.parametrize("layer", [6, 21])
def test_a_module_cannot_be_skipped_once_it_runs(engine: Engine, layer: int) -> None:
    layers = engine.layers
    for inner in (layers[layer].mlp.gate_up_proj, layers[layer].mlp):
        with pytest.raises(OutOfOrderError, match=rf"layers\.{layer}\.mlp\.skip#0") as caught:
            with engine.model.trace(PROMPT, max_tokens=2):
                value = inner.output
                layers[layer].mlp.skip(torch.zeros(10, 576))
        assert line_of(caught.value).startswith("layers[layer].mlp.skip")


@pytest.mark.parametrize("layer", [6, 21])
def test_a_skip_that_does_not_fit_the_rows_is_refused_at_its_line(
    engine: Engine, layer: int
) -> None:
    layers = engine.layers
    for value in (torch.zeros(9, 576), torch.zeros(10, 5), None, (torch.zeros(10, 576),) * 2):
        with pytest.raises(RowsError) as caught:
            with engine.model.trace(PROMPT, max_tokens=2):
                layers[layer].mlp.skip(value)
        assert line_of(caught.value) == "layers[layer].mlp.skip(value)"


def test_a_part_that_spans_the_stages_may_be_skipped(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.model.skip(torch.ones(10, 576))
        seen = model.model.output.save()
        logits = model.logits.save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.model.output = torch.ones(10, 576)
        wanted = model.logits.save()
    assert torch.equal(seen, torch.ones(10, 576))
    assert torch.equal(logits, wanted)
    with pytest.raises(OutOfOrderError, match=r"layers\.3\.output#0"):
        with model.trace(PROMPT, max_tokens=1):
            model.model.skip(torch.ones(10, 576))
            inner = layers[3].output.save()


def test_a_skip_leaves_the_neighbours_alone(engine: Engine) -> None:
    model, layers = engine.model, engine.layers

    def beside(skips: bool) -> list[Any]:
        with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            seen = [].save()
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[:3]:
                    seen.append(layers[8].mlp.down_proj.output)
                    seen.append(layers[22].mlp.output)
                    seen.append(model.logits)
            with tracer.invoke(SHORT):
                for _ in tracer.iter[:3]:
                    if skips:
                        hidden = layers[8].mlp.input
                        layers[8].mlp.skip(torch.full_like(hidden, 7.0))
                        layers[22].mlp.skip(torch.full_like(hidden, -7.0))
            with tracer.invoke(LONGER):
                pass
        return seen

    for one, other in zip(beside(skips=False), beside(skips=True), strict=True):
        assert_equal(one, other)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one is other or torch.equal(one, other)


# ------------------------------------------------------------------------------------- the cache


def test_a_cache_of_everything_holds_what_reads_would_have_given(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        cache = tracer.cache(include_inputs=True)
        early = layers[3].output.save()
        into = layers[16].inputs.save()
        late = layers[20].mlp.down_proj.output.save()
        whole = model.model.output.save()
        logits = model.logits.save()
    assert_equal(cache["model.model.layers.3"].output, early)
    assert_equal(cache.model.layers[16].inputs[0], into[0])
    assert_equal(cache.model.layers[20].mlp.down_proj.output, late)
    assert_equal(cache["model.model"].output, whole)
    args, kwargs = cache["model.model"].inputs
    assert any(
        torch.equal(value, torch.arange(10))
        for value in (*args, *kwargs.values())
        if torch.is_tensor(value)
    )
    assert_equal(cache["model.logits_processor"].output, logits)
    paths = cache.keys()
    assert paths.index("model.model.layers.3.mlp") < paths.index("model.model.layers.3")
    assert paths.index("model.model.layers.29") < paths.index("model.model.norm")
    assert paths[-3:] == ["model.model", "model", "model.logits_processor"]
    assert "model.lm_head" not in paths
    assert len(paths) > 200


def test_a_cache_is_read_behind_its_block_and_made_before_any_value(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    for use in ("cache.model", "cache.keys()", "len(cache)", "'model' in cache"):
        with pytest.raises(NotSupportedError, match="read in its block"):
            with model.trace(PROMPT, max_tokens=1) as tracer:
                cache = tracer.cache()
                eval(use)
    with pytest.raises(CacheError, match="before reading or modifying"):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            early = layers[3].output
            cache = tracer.cache()
    with pytest.raises(NotServedError):
        with model.trace(PROMPT, max_tokens=1) as tracer:
            cache = tracer.cache([model.lm_head])


def test_each_request_caches_its_own_rows(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        caches = [].save()
        with tracer.invoke(PROMPT):
            caches.append(tracer.cache([layers[3].mlp, "model.model.layers.25.mlp"]))
        with tracer.invoke(SHORT, max_tokens=2):
            caches.append(tracer.cache([layers[3].mlp, "model.nowhere"]))
        with tracer.invoke(LONGER):
            layers[3].mlp.output[:] = 0
    first, second = caches
    assert [value.shape[0] for value in first["model.model.layers.25.mlp"].output] == [10, 1, 1]
    assert [value.shape[0] for value in second.model.layers[3].mlp.output] == [4, 1]
    assert all(value.any() for value in second.model.layers[3].mlp.output)


def test_a_cache_that_cannot_keep_a_value_fails_its_own_request(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises((RuntimeError, TypeError)):
        with model.trace(temperature=0.0, max_tokens=2) as tracer:
            rows = [].save()
            with tracer.invoke(PROMPT):
                cache = tracer.cache(device="nowhere")
            with tracer.invoke(SHORT):
                for _ in tracer.iter[:2]:
                    rows.append(layers[25].mlp.output.shape[0])
    assert rows == [4, 1]


# ------------------------------------------------------------------------------------- the edits


def test_a_stored_edit_runs_first_in_every_request(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    plain = model.generate(PROMPT, temperature=0.0, max_tokens=3)[0]
    with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
        wanted = [].save()
        for _ in tracer.iter[:2]:
            early = layers[3].mlp.output
            layers[22].mlp.output[:] += 5 * early
            wanted.append(layers[22].mlp.output)
        out = tracer.result.save()
    factor = 5.0
    with model.edit() as (tracer, edit):
        for _ in tracer.iter[:2]:
            early = layers[3].mlp.output
            layers[22].mlp.output[:] += factor * early
            size = early.norm().save()
    factor = 0.0
    try:
        with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
            seen = [].save()
            for _ in tracer.iter[:2]:
                seen.append(layers[22].mlp.output)
            again = tracer.result.save()
        made = model.generate([PROMPT, SHORT], temperature=0.0, max_tokens=3)
        with model.trace(PROMPT, temperature=0.0, max_tokens=3):
            pass
    finally:
        edit.clear()
    assert_equal(tuple(seen), tuple(wanted))
    assert again.outputs[0].token_ids == out.outputs[0].token_ids
    assert made[0].outputs[0].token_ids == out.outputs[0].token_ids
    assert float(again.saves["size"]) == pytest.approx(float(made[0].saves["size"]), rel=1e-4)
    assert set(made[1].saves) == {"size"}
    after = model.generate(PROMPT, temperature=0.0, max_tokens=3)[0]
    assert after.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_named_edit_runs_only_for_who_asks_for_it(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.edit("zero") as (tracer, _):
        layers[4].mlp.output[:] = 0
        kept = layers[4].mlp.output.sum().save()
    with model.edit(name="one") as (tracer, _):
        layers[4].mlp.output = layers[4].mlp.output + 1
    try:
        with model.trace(temperature=0.0, max_tokens=2, edits=["zero", "one"]) as tracer:
            sums = [None, None, None].save()
            with tracer.invoke(PROMPT):
                sums[0] = layers[4].mlp.output.sum().item()
            with tracer.invoke(PROMPT, edits=["zero"]):
                sums[1] = layers[4].mlp.output.sum().item()
            with tracer.invoke(PROMPT, edits=[]):
                sums[2] = layers[4].mlp.output.sum().item()
        assert sums[:2] == [5760.0, 0.0]
        assert sums[2] not in (0.0, 5760.0)
        assert model.generate(PROMPT, max_tokens=1)[0].outputs
        out = model.generate(PROMPT, max_tokens=1, edits=["zero"])[0]
        assert out.saves == {"kept": 0}
        with pytest.raises(ValueError, match="no edit is installed under that name"):
            model.generate(PROMPT, max_tokens=1, edits=["two"])
        with pytest.raises(TypeError, match="list of edit names"):
            with model.trace(PROMPT, max_tokens=1, edits="zero"):
                layers[4].output
        with pytest.raises(ValueError, match="installed already"):
            with model.edit("zero") as (tracer, _):
                layers[4].output
    finally:
        model.clear_edits()
    with pytest.raises(ValueError, match="no edit is installed"):
        model.generate(PROMPT, max_tokens=1, edits=["zero"])


def test_an_edit_in_place_that_raises_fails_every_request(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(NotSupportedError, match="inplace"):
        model.edit(inplace=False)
    with model.edit(inplace=True) as tracer:
        value = layers[25].mlp.output
        raise ZeroDivisionError(f"{value.shape[0]} rows")
    try:
        with pytest.raises(ZeroDivisionError, match="10 rows"):
            model.generate(PROMPT, max_tokens=50, ignore_eos=True)
        with pytest.raises(ZeroDivisionError, match="10 rows"):
            with model.trace(PROMPT, max_tokens=2):
                late = layers[3].output.save()
    finally:
        model.clear_edits()


def test_a_block_is_served_what_an_edit_skips(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.edit("skips") as (tracer, _):
        layers[21].mlp.skip(torch.ones_like(layers[3].mlp.output))
    try:
        with model.trace(PROMPT, max_tokens=1, edits=["skips"]) as tracer:
            cache = tracer.cache([layers[21].mlp, layers[21].mlp.down_proj])
            seen = layers[21].mlp.output.save()
        assert torch.equal(seen, torch.ones(10, 576))
        assert cache.keys() == ["model.model.layers.21.mlp"]
        with pytest.raises(OutOfOrderError, match=r"layers\.21\.mlp\.down_proj\.output#0"):
            with model.trace(PROMPT, max_tokens=1, edits=["skips"]):
                inner = layers[21].mlp.down_proj.output.save()
    finally:
        model.clear_edits()


# ------------------------------------------------------------------------------------ the refused


def test_what_the_engine_cannot_do_is_refused_at_its_line(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    refused = {
        "layers[3].mlp.source": "rewritten forwards",
        "layers[3].input_layernorm(torch.zeros(1, 576), hook=True)": "names each value by its step",
        "layers[3].trace(1)": "only the whole model",
        "layers[3].input_layernorm.weight.add_(1)": "shared by every request",
        "layers[26].input_layernorm.weight[:2].zero_()": "shared by every request",
        "model.edit()": "model.edit was called",
        "model.session()": "model.session was called",
        "model.clear_edits()": "model.clear_edits was called",
    }
    for use, text in refused.items():
        with pytest.raises(NotSupportedError, match=text) as caught:
            with model.trace(PROMPT, max_tokens=2):
                known = (model, layers, torch)
                first = layers[2].mlp.output
                eval(use)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert "eval(use)" in [frame.line for frame in frames]
    with pytest.raises(NotImplementedError, match="does not require grad") as caught:
        with model.trace(PROMPT, max_tokens=2):
            loss = layers[2].mlp.output.sum()
            with loss.backward():
                grad = loss.grad.save()
    assert line_of(caught.value).startswith("with loss.backward")
    with pytest.raises(NotSupportedError, match="scan is unavailable on vLLM"):
        model.scan(PROMPT)
