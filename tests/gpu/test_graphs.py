"""On a device that replays CUDA graphs, steps with a block run eagerly and give the same values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends import LONGER, PROMPT, SHORT, Engine, Local
from engine.table import assert_block_same
from gpu.test_stages import NAMES


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine(str(smollm2_path), 1, enforce_eager=False)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_block(name: str, engine: Engine, local: Local) -> None:
    assert_block_same(name, engine, local)


def test_replayed_steps_are_the_same_before_and_after_a_block(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    prompts, options = [PROMPT, SHORT, LONGER], {"temperature": 0.0, "max_tokens": 8}

    def plain() -> list[Any]:
        return [one.outputs[0].token_ids for one in model.generate(prompts, **options)]

    before = plain()
    with model.trace(PROMPT, **options) as tracer:
        rows = [].save()
        for _ in tracer.iter[:8]:
            layers[3].mlp.output[:] += 1
            rows.append(layers[20].mlp.output.shape[0])
    assert rows[1:] == [1] * 7, "a step's rows are not those of a padded batch"
    assert plain() == before
