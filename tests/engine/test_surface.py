"""The rest of the surface on two stages: what ends, skips, keeps and stores.

The engine's scheduler runs in this process, so that the requests of a trace always form the same
batches and neighbours can be compared to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import LONGER, PROMPT, SHORT, Engine
from nnsight_pp.engines.vllm.schedule import STOP_REASON


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine(str(smollm2_path), 2, in_process=True)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    yield
    for rank in engine.model.statistics():
        alive = ("tracked", "requests", "workers", "parked", "published", "shelves", "waiting")
        assert {key: rank[key] for key in (*alive, "pending") if rank.get(key)} == {}


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
