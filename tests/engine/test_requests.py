"""Several requests in one batch on two stages: their own rows, their own errors, their own ends."""

from __future__ import annotations

import linecache
import random
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import LONGER, PROMPT, SHORT, Engine, Local, vllm_stream
from engine.compare import assert_same
from nnsight_pp import (
    BlockError,
    ConfigurationError,
    NotServedError,
    NotSupportedError,
    OutOfOrderError,
    RowsError,
    UnknownLocationError,
    ValueUnavailableError,
)

pytestmark = pytest.mark.parametrize("engine", [2], indirect=True, ids=["vllm-2"], scope="module")
PARIS = 7042


def iter_rows(value: Any) -> Iterator[Any]:
    """A generator: nothing can pickle it."""
    yield from value


class UsersOwnError(Exception):
    """An exception class of the user's own file."""


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    yield
    assert engine.model.request_counts() == [0, 0]
    engine.assert_idle()


def alone(local: Local, prompt: str, layer: int) -> torch.Tensor:
    layers = local.layers
    with local.context(), local.trace(prompt):
        stream = layers[layer].output[0].save()
    return stream


def test_prompts_of_different_length_see_their_own_rows(engine: Engine, local: Local) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        with tracer.invoke(PROMPT):
            early_1 = vllm_stream(layers[3]).save()
            late_1 = vllm_stream(layers[25]).save()
        with tracer.invoke(SHORT):
            early_2 = vllm_stream(layers[3]).save()
            late_2 = vllm_stream(layers[25]).save()
        with tracer.invoke(LONGER, max_tokens=1):
            late_3 = vllm_stream(layers[25]).save()
    assert_same(early_1, alone(local, PROMPT, 3), "early_1")
    assert_same(late_1, alone(local, PROMPT, 25), "late_1")
    assert_same(early_2, alone(local, SHORT, 3), "early_2")
    assert_same(late_2, alone(local, SHORT, 25), "late_2")
    assert_same(late_3, alone(local, LONGER, 25), "late_3")


def test_an_edit_reaches_only_its_own_request(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(temperature=0.0, max_tokens=3) as tracer:
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:3]:
                layers[4].mlp.output[:] = 7
                layers[22].mlp.output[:] = -7
            edited = tracer.result.save()
        with tracer.invoke(PROMPT):
            plain = tracer.result.save()
        with tracer.invoke(PROMPT):
            pass
    untouched = model.generate(PROMPT, temperature=0.0, max_tokens=3)[0]
    assert plain.outputs[0].token_ids == untouched.outputs[0].token_ids
    assert edited.outputs[0].token_ids != untouched.outputs[0].token_ids


def test_saves_of_many_megabytes_come_from_every_stage(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    # From each stage 4 MB of its own values, and as much of what both have computed.
    with model.trace(list(range(500, 720)), temperature=0.0, max_tokens=1):
        early = [layer.mlp.output for layer in layers[:15]].save()
        late = [layer.mlp.output for layer in layers[15:]].save()
        summed = [one + two for one, two in zip(early[:5], late[:5], strict=True)].save()
        short = early[2][-1].save()
    assert sum(one.nbytes for one in early) > 4 << 20
    assert torch.equal(short, early[2][-1])
    for one, two, both in zip(early, late, summed, strict=False):
        assert torch.equal(both, one + two)
    late[0][:] = 0  # the caller's own memory
    assert float(early[0].abs().sum()) > 0


def test_small_reports_come_home_with_the_last_token(
    engine: Engine, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layers = engine.model, engine.layers
    calls: list[str] = []
    call = model._call
    monkeypatch.setattr(
        model, "_call", lambda name, *args: (calls.append(name), call(name, *args))[1]
    )
    with model.trace(PROMPT, temperature=0.0, max_tokens=9) as tracer:
        stopped = [vllm_stream(layers[3]), layers[25].mlp.output].save()
        tracer.stop()
    with model.trace(temperature=0.0, max_tokens=2) as tracer:
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:2]:
                late = layers[25].mlp.output.save()
        with tracer.invoke(SHORT, max_tokens=1):
            short = vllm_stream(layers[3]).save()
    with model.trace(PROMPT, max_tokens=2):  # it is over before its request is
        first = vllm_stream(layers[3]).save()
    assert calls == []
    assert_same(stopped[0], alone(local, PROMPT, 3), "stopped")
    assert_same(short, alone(local, SHORT, 3), "short")

    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        rows = {}.save()
        for step in tracer.iter[:2]:
            rows[step] = layers[25].mlp.output
        result = tracer.result.save()
    assert calls == ["nnsight_collect"]
    assert_same(stopped[1], rows[0], "a value of the last stage")
    assert_same(late, rows[1], "a value of the last step")
    assert len(result.outputs[0].token_ids) == 2
    with model.trace(PROMPT, max_tokens=1):
        large = vllm_stream(layers[3]).repeat(100, 1).save()
    with model.trace(PROMPT, max_tokens=1):  # behind the step the first stage gets the other's
        summed = (layers[3].mlp.output + layers[25].mlp.output).save()
    assert calls[1:] == ["nnsight_collect"] * 2
    with pytest.raises(ZeroDivisionError), model.trace(PROMPT, max_tokens=1):
        layers[25].mlp.output.sum() / (1 // 0)
    assert calls[3:] == ["nnsight_collect"]
    assert_same(first, stopped[0], "first")
    assert_same(large[-len(first) :], first, "large")
    assert summed.shape == first.shape


def test_a_list_of_the_trace_collects_from_every_invoke(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        rows = [].save()
        with tracer.invoke(PROMPT):
            rows.append(layers[2].mlp.output[-1])
        with tracer.invoke(SHORT):
            rows.append(layers[20].mlp.output[-1])
    assert [tuple(row.shape) for row in rows] == [(576,), (576,)]


def test_a_block_that_raises_on_the_last_stage_leaves_three_others_alone(engine: Engine) -> None:
    model, layers = engine.model, engine.layers

    def run(fails: bool) -> list[Any]:
        found: list[Any] = []
        with model.trace(temperature=0.0, max_tokens=3) as tracer:
            with tracer.invoke(PROMPT):
                first = [].save()
                for _ in tracer.iter[:3]:
                    first.append(model.logits)
            with tracer.invoke(LONGER):
                if fails:
                    value = layers[20].mlp.output
                    assert value.shape[0] == 1, "not one row"
            with tracer.invoke(SHORT):
                second = vllm_stream(layers[27]).save()
            with tracer.invoke(PROMPT):
                third = tracer.result.save()
        found += [first, second, third.outputs[0].token_ids]
        return found

    calm = run(fails=False)
    with pytest.raises(AssertionError, match="not one row") as caught:
        run(fails=True)
    lines = [frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__)]
    here = run.__code__.co_firstlineno
    assert here + 10 in lines, "the traceback shows the user's line"
    again = run(fails=False)
    assert_same(again[0], calm[0], "logits")
    assert_same(again[1], calm[1], "stream")
    assert calm[2] == again[2]


@pytest.mark.parametrize("layer", [2, 25])
def test_an_exception_keeps_its_class_and_its_line(engine: Engine, layer: int) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(UsersOwnError, match="seen 10 rows") as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            value = layers[layer].mlp.output
            raise UsersOwnError(f"seen {value.shape[0]} rows")
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line is not None
    assert last.line.startswith("raise UsersOwnError")
    assert Path(last.filename) == Path(__file__)


@pytest.mark.parametrize(("first", "second"), [(20, 3), (25, 20), (5, 2)])
def test_a_location_asked_for_too_late_is_refused_by_name(
    engine: Engine, first: int, second: int
) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(OutOfOrderError, match=rf"layers\.{second}\.mlp\.output#0") as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=2):
            late = layers[first].mlp.output.save()
            early = layers[second].mlp.output.save()
    lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any(line.startswith("early = ") for line in lines)
    assert "already ran past" in str(caught.value)


def test_the_engine_serves_on_after_an_error(engine: Engine, local: Local) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(ZeroDivisionError):
        with model.trace(PROMPT, temperature=0.0, max_tokens=2):
            layers[3].mlp.output[:] = 1 / 0
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        late = vllm_stream(layers[25]).save()
    assert_same(late, alone(local, PROMPT, 25), "late")


@pytest.mark.parametrize("bounded", [True, False])
def test_a_loop_ends_with_the_request_at_an_early_stop(engine: Engine, bounded: bool) -> None:
    model, layers = engine.model, engine.layers
    ids = model.generate(PROMPT, temperature=0.0, max_tokens=4)[0].outputs[0].token_ids
    options = {"temperature": 0.0, "max_tokens": 8, "stop_token_ids": [ids[2]]}
    with pytest.warns(UserWarning, match="never reached"):
        with model.trace(PROMPT, **options) as tracer:
            early, late, ended = [].save(), [].save(), [].save()
            try:
                for _ in tracer.iter[:6] if bounded else tracer.iter[:]:
                    early.append(layers[2].mlp.output)
                    late.append(layers[20].mlp.output)
                early.append("after the loop")
            finally:
                ended.append("finally")
    assert [value.shape[0] for value in early] == [10, 1, 1]
    assert [value.shape[0] for value in late] == [10, 1, 1]
    assert ended == ["finally"]


def test_an_open_loop_of_remote_reads_only_is_paced_by_the_engine(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.warns(UserWarning, match="never reached"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=5) as tracer:
            late = [].save()
            for _ in tracer.all():
                late.append(layers[27].mlp.output[-1])
    assert len(late) == 5


def test_a_forced_sample_is_what_the_engine_goes_on_with(engine: Engine) -> None:
    model = engine.model
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        sampled = []
        sampled.save()
        for step in tracer.iter[:2]:
            ids = model.samples
            sampled.append(int(ids))
            if step == 0:
                model.samples = torch.full_like(ids, 1234)
        out = tracer.result.save()
    assert sampled[0] == PARIS
    assert out.outputs[0].token_ids[0] == 1234
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.samples[:] = 77
        forced = model.samples.save()
    assert int(forced) == 77


def test_a_token_id_beyond_the_vocabulary_is_refused(engine: Engine) -> None:
    model = engine.model
    with pytest.raises(RowsError, match="token id"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=2):
            model.samples = torch.full_like(model.samples, 10**6)
    with pytest.raises(RowsError, match="token id"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=2):
            model.samples[:] = -1


def test_a_write_that_makes_the_model_fail_ends_its_own_requests_only(engine: Engine) -> None:
    """The step is computed again without the blocks, so the request beside it goes on."""
    model = engine.model
    with pytest.raises(BlockError, match="The model failed beside this block"):
        with model.trace(temperature=0.0, max_tokens=3) as tracer:
            with tracer.invoke(PROMPT):
                model.model.embed_tokens.input[:] = 10**6
            with tracer.invoke(PROMPT):
                pass
    plain = model.generate(PROMPT, temperature=0.0, max_tokens=3)[0]
    assert plain.outputs[0].text == " Paris, France"


def test_a_logit_edit_decides_the_token(engine: Engine) -> None:
    model = engine.model
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        model.logits[0, 4321] = 1e6
        out = tracer.result.save()
    assert list(out.outputs[0].token_ids) == [4321]


def test_a_bad_path_lists_near_matches(engine: Engine) -> None:
    model = engine.model
    with pytest.raises(UnknownLocationError, match="self_attn"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            model.model.layers[20].self_atn.output.save()


@pytest.mark.parametrize("child", ["lm_head", "model.layers"])
def test_what_is_never_called_is_refused(engine: Engine, child: str) -> None:
    model = engine.model
    node = model.get(child)
    with pytest.raises(NotServedError, match="never computed"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            node.output.save()


def test_the_embedding_fires_on_the_first_stage_although_it_is_tied(
    engine: Engine, local: Local
) -> None:
    model = engine.model
    with local.context(), local.trace(PROMPT):
        wanted = local.model.model.embed_tokens.output[0].save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        found = model.model.embed_tokens.output.save()
        normed = model.model.norm.output[0].save()
        hidden = model.model.output.save()
    assert_same(found, wanted, "embedding")
    assert_same(hidden, normed, "the model's output is the last stage's")


@pytest.mark.parametrize("layer", [4, 23])
def test_rows_of_the_wrong_number_are_refused_at_the_line(engine: Engine, layer: int) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(RowsError, match="shape") as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            layers[layer].mlp.output = torch.zeros(3, 576)
    lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("torch.zeros(3, 576)" in line for line in lines)


def test_a_saved_value_that_cannot_leave_is_named(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(ValueUnavailableError, match="'lines'"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            value = layers[3].mlp.output.save()
            lines = [iter_rows(value)].save()
    assert value.shape == (10, 576)


def test_what_would_change_the_engine_for_others_is_refused(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(NotSupportedError, match="called inside a block"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            again = layers[3].self_attn(torch.zeros(10), layers[3].input[0]).save()
    with pytest.raises(NotSupportedError, match="set inside a block"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            layers[3].mlp.scale = 3


def test_a_weight_that_vllm_has_repacked_is_refused(engine: Engine) -> None:
    """On CPUs vLLM packs the weights of linear layers and drops them."""
    model, layers = engine.model, engine.layers
    for index in (3, 25):
        with pytest.raises(NotSupportedError, match="repacked"):
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                size = layers[index].mlp.down_proj.weight.norm().save()


def test_a_call_that_comes_too_late_is_named(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(OutOfOrderError, match=r"layers\.1\.input_layernorm\.call"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=2):
            late = layers[22].mlp.output
            size = layers[1].input_layernorm(late).norm()
            layers[25].mlp.output[:] *= float(size)


def test_a_weight_is_edited_in_a_copy_only(engine: Engine, local: Local) -> None:
    model, layers = engine.model, engine.layers
    for index in (3, 25):
        with pytest.raises(NotSupportedError, match="shared by every request") as caught:
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                weight = layers[index].input_layernorm.weight
                weight[:] = 0
        lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "weight[:] = 0" in lines
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        for index in (3, 25):
            own = layers[index].input_layernorm.weight.clone()
            own[:] = 0
        zeroed = own.abs().sum().save()
        late = vllm_stream(layers[25]).save()
    assert float(zeroed) == 0
    assert_same(late, alone(local, PROMPT, 25), "late")


def test_options_and_prompts_are_checked_before_anything_runs(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(TypeError, match="hotness"):
        with model.trace(PROMPT, hotness=0.0):
            layers[3].output.save()
    with pytest.raises(ConfigurationError, match="one prompt"):
        with model.trace([PROMPT, SHORT], max_tokens=1):
            layers[3].output.save()
    with pytest.raises(NotSupportedError, match="n=2"):
        with model.trace(n=2, max_tokens=1) as tracer:
            with tracer.invoke(PROMPT):
                value = layers[3].output
            with tracer.invoke(SHORT):
                layers[4].output
                again = value
    with pytest.raises(ValueError, match="maximum context length"):
        with model.trace("word " * 2000, max_tokens=1):
            layers[3].output.save()


def test_a_remote_value_moves_only_when_it_is_used(engine: Engine) -> None:
    model, layers = engine.model, engine.layers

    def received() -> int:
        return sum(
            peer["bytes_received"]
            for rank in model.statistics()
            for peer in rank["traffic"].values()
        )

    before = received()
    with model.trace(LONGER, temperature=0.0, max_tokens=1):
        early = layers[2].mlp.output.save()
        part = early[-1]
        late = layers[25].mlp.output.save()
        late_part = late[0].save()
    unused = received() - before
    assert unused < 1000, "only the releases crossed"
    before = received()
    with model.trace(LONGER, temperature=0.0, max_tokens=1):
        early = layers[2].mlp.output
        layers[25].mlp.output[0] += early[-1]
    row = received() - before
    assert 576 * 4 < row < 2 * 576 * 4, "one row crossed"


def test_a_trace_tells_which_line_moved_what(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
        early = layers[2].mlp.output
        layers[25].mlp.output[0] += early[-1]
    ((stage, record),) = tracer.statistics["pulls"]
    assert (stage, record.owner, record.num_pulls) == (1, 0, 1)
    assert record.location == "model.model.layers.2.mlp.output"
    assert record.bytes_received >= 576 * 4
    assert "layers[25]" in linecache.getline(record.filename, record.line)
    (line,) = tracer.stats
    assert line.text == "layers[25].mlp.output[0] += early[-1]"
    assert tracer.stats.pairs == {(1, 0): (1, record.bytes_received, 1000 * record.waited_s)}


def test_numbers_that_a_block_draws_agree_on_all_stages(engine: Engine) -> None:
    """The noise that comes back is the noise that was added, wherever it was added."""
    model, layers = engine.model, engine.layers

    def noisy(layer: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        torch.manual_seed(5)
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            noise = torch.randn(576).save()
            factor = random.random().save()
            value = layers[layer].mlp.output
            before = value.clone()
            value[:] += factor * noise
            change = (value - before).save()
        return noise, change, factor

    runs = [noisy(3), noisy(25)]
    for noise, change, factor in runs:
        assert_same(change, (factor * noise).expand(10, -1), "the change is the saved noise")
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][2] == runs[1][2]
    plain = model.generate(PROMPT, temperature=1.0, seed=3, max_tokens=4)[0].outputs[0].token_ids
    with model.trace(PROMPT, temperature=1.0, seed=3, max_tokens=4) as tracer:
        for _ in tracer.iter[:4]:
            drawn = torch.rand(3)
        out = tracer.result.save()
    assert out.outputs[0].token_ids == plain, "drawing in a block leaves the sampler alone"


def test_the_tree_shows_the_owning_stage(engine: Engine) -> None:
    text = repr(engine.model)
    assert re.search(r"\(0-14\): (15 x )?LlamaDecoderLayer\(  # stage 0\n", text)
    assert re.search(r"\(15-29\): (15 x )?LlamaDecoderLayer\(  # stage 1\n", text)


def test_many_requests_share_the_pipeline(
    engine: Engine, local: Local, reference: Callable[[str], dict[str, Any]]
) -> None:
    """More tokens than fit into one batch, so that two batches are in flight."""
    model, layers = engine.model, engine.layers
    prompts = [f"{word} {LONGER} {LONGER} {LONGER}" for word in ["one", "two", "three", "four"]] * 4
    found: list[Any] = []
    with model.trace(temperature=0.0, max_tokens=3) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:3]:
                    early = layers[5].mlp.output
                    layers[20].mlp.output[-1] += 0.1 * early[-1]
                    found.append(model.logits[0].argmax())
    assert len(found) == 3 * len(prompts)
    # As in one process: what all of them put in one step, then in the next.
    chosen = [int(value) for value in found]
    of_prompt = [chosen[index :: len(prompts)] for index in range(len(prompts))]
    assert of_prompt == of_prompt[:4] * 4
