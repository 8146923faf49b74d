"""Sessions on two stages: what a trace binds is there for the next one, on the ranks."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.backends import PROMPT, SHORT, Engine
from nnsight_pp import NotSupportedError, OutsideTraceError

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


def resident(engine: Engine) -> list[int]:
    return [rank["resident"] for rank in engine.model.statistics()]


def received(engine: Engine) -> int:
    return sum(
        peer["bytes_received"]
        for rank in engine.model.statistics()
        for peer in rank["traffic"].values()
    )


def test_values_of_one_trace_are_patched_into_the_next(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        early = layers[3].mlp.output.save()
        late = layers[25].mlp.output.save()
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        layers[4].mlp.output[-1] += 2 * late[-1]
        layers[20].mlp.output[-1] = early[-1]
        wanted = model.logits.save()
    kept = [0, 0]
    with model.session():
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            values = {"early": layers[3].mlp.output, "late": (layers[25].mlp.output, 2.0)}
        kept = resident(engine)
        before = received(engine)
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            layers[4].mlp.output[-1] += values["late"][1] * values["late"][0][-1]
            layers[20].mlp.output[-1] = values["early"][-1]
            found = model.logits.save()
        kept = (kept, received(engine) - before)
        kept = kept.save()
    assert kept[0] == [1, 1]
    assert kept[1] < 4 * 2 * 576 + 4096, "one row crossed each way"
    assert torch.equal(found, wanted)


def test_lines_between_the_traces_see_what_they_need(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.session():
        with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
            rows = []
            for step in tracer.iter[:3]:
                rows.append(layers[22].mlp.output[-1])
            norm = layers
            number = len(rows)
            kept = rows[0].save()
        assert number == 3
        assert step == 2
        assert norm is layers or norm[0].path == layers[0].path
        total = torch.stack(list(rows)).sum(0)
        same = [torch.equal(rows[0], kept)].save()
        largest = max(range(3), key=lambda index: float(rows[index].norm()))
        rows[1] += 1
        with model.trace(SHORT, temperature=0.0, max_tokens=1):
            layers[5].mlp.output[-1] = rows[1] - rows[largest] + total
            seen = layers[5].mlp.output[-1].save()
        answer = (rows[1] - rows[largest] + total).save()
        rows = rows.save()
    assert same == [True]
    assert torch.equal(seen, answer)
    assert [type(row) for row in rows] == [torch.Tensor] * 3


def test_only_what_is_saved_leaves_a_session(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    outer: list[Any] = []
    with model.session():
        with model.trace() as tracer:
            with tracer.invoke(PROMPT, max_tokens=1):
                unsaved = layers[3].mlp.output
            with tracer.invoke(SHORT, max_tokens=1):
                late = layers[25].mlp.output
                saved = late[-1].save()
        outer.append(late)
        again = unsaved[0].save()
        with model.session():
            with model.trace(PROMPT, max_tokens=1):
                both = (unsaved[0] + late[0]).save()
    assert saved.shape == again.shape == both.shape == (576,)
    with pytest.raises(UnboundLocalError):
        print(unsaved)
    with pytest.raises(OutsideTraceError, match="'late' of a session"):
        float(outer[0].sum())


@pytest.mark.parametrize("layer", [3, 25])
def test_a_kept_value_may_not_be_edited_by_a_later_trace(engine: Engine, layer: int) -> None:
    model, layers = engine.model, engine.layers
    refused, by_torch = "earlier trace of the session", "inference tensor"
    edits = {
        "value[0] = 0": refused,
        "value += 1": refused,
        "value.zero_()": refused,
        "value.view(-1)[3] += 1": by_torch,
        "value.numpy()[0] = 1": refused,
    }
    for edit, words in edits.items():
        with pytest.raises((NotSupportedError, RuntimeError), match=words) as caught:
            with model.session():
                with model.trace(PROMPT, max_tokens=1):
                    value = layers[layer].mlp.output
                with model.trace(PROMPT, max_tokens=1):
                    exec(edit, {"value": value})
                    layers[10].mlp.output[-1] = value[-1]
        lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
        # What numpy does to shared memory is seen only when the block is over.
        assert any(line.startswith("exec(edit") for line in lines) or "numpy" in edit
    with model.session():
        with model.trace(PROMPT, max_tokens=1):
            value = layers[layer].mlp.output
        with model.trace(PROMPT, max_tokens=1):
            own = value.clone()
            own[0] = 0
            layers[10].mlp.output[-1] = value[-1]
            own = own.save()
    assert not own[0].any()


def test_an_error_in_a_session_leaves_nothing_behind(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(ZeroDivisionError):
        with model.session():
            with model.trace(PROMPT, max_tokens=1):
                value = layers[3].mlp.output
            with model.trace(PROMPT, max_tokens=1):
                layers[25].mlp.output[-1] = value[-1] / (1 // 0)
    with pytest.raises(KeyError):
        with model.session():
            with model.trace(PROMPT, max_tokens=1):
                value = layers[3].mlp.output
            raise KeyError("between")
    assert resident(engine) == [0, 0]


def test_what_cannot_stay_is_refused_where_it_is_used(engine: Engine) -> None:
    """Not taken from around the session, where a name may stand for what an earlier run left."""
    model, layers = engine.model, engine.layers
    double: Any = "an older value"
    with pytest.raises(NotSupportedError, match=r"'double'.*is a function"):
        with model.session():
            with model.trace(PROMPT, max_tokens=1):
                first = layers[2].mlp.output

                def double(value: Any) -> Any:
                    return 2 * value

                kept = double(layers[3].mlp.output)
            with model.trace(PROMPT, max_tokens=1):
                layers[10].mlp.output[-1] = double(kept)[-1]
    with pytest.raises(NotSupportedError, match="'double'"):
        with model.session():
            with model.trace(PROMPT, max_tokens=1):
                first = layers[2].mlp.output

                def double(value: Any) -> Any:
                    return 2 * value

            double(1)
