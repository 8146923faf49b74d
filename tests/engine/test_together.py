"""Invokes that share names: one trace on an engine, as in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.backends import LONGER, PROMPT, SHORT, Engine, Local
from engine.compare import assert_same
from nnsight_pp import (
    BarrierError,
    ConfigurationError,
    LanguageModel,
    NotSupportedError,
    ValueUnavailableError,
)
from nnsight_pp.engines.vllm import client
from nnsight_pp.engines.vllm.batch import Batch

pytestmark = pytest.mark.parametrize("engine", [2], indirect=True, ids=["vllm-2"], scope="module")
# Both have ten tokens.
CLEAN = PROMPT
CORRUPT = "The Brandenburg Gate is located in the city of"
LAYERS, POSITIONS = (3, 13, 22, 28), (4, -1)


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    yield
    assert set(engine.model.request_counts()) == {0}
    engine.assert_idle()


def patched(backend: Any, trace: Callable[[], Any]) -> dict[Any, torch.Tensor]:
    """Patch a clean run's MLP outputs into a corrupt run, layer by position, in one trace."""
    ops, model, layers = backend.ops, backend.model, backend.layers
    with trace() as tracer:
        logits = {}.save()
        with tracer.invoke(CLEAN):
            clean = {}
            for index in LAYERS:
                clean[index] = ops.mlp(layers[index]).clone()
            logits["clean"] = ops.logits(model)
        for layer in LAYERS:
            for position in POSITIONS:
                with tracer.invoke(CORRUPT):
                    h = ops.mlp(layers[layer])
                    h[position] = clean[layer][position]
                    logits[layer, position] = ops.logits(model)
    return logits


def by_hooks(local: Local) -> dict[Any, torch.Tensor]:
    """Do the same with torch's own hooks, one forward after the other."""
    module = local.model._module

    def run(prompt: str, hooks: dict[int, Callable[..., Any]]) -> torch.Tensor:
        handles = [
            module.model.layers[layer].mlp.register_forward_hook(hook)
            for layer, hook in hooks.items()
        ]
        try:
            with torch.no_grad():
                ids = local.tokenizer(prompt, return_tensors="pt").input_ids
                return module(ids).logits[0, -1:]
        finally:
            for handle in handles:
                handle.remove()

    clean: dict[int, torch.Tensor] = {}

    def kept(layer: int) -> Callable[..., Any]:
        return lambda _module, _given, output: clean.update({layer: output.clone()})

    def replaced(layer: int, position: int) -> Callable[..., Any]:
        def hook(_module: Any, _given: Any, output: torch.Tensor) -> None:
            output[0, position] = clean[layer][0, position]

        return hook

    logits: dict[Any, torch.Tensor] = {"clean": run(CLEAN, {one: kept(one) for one in LAYERS})}
    for layer in LAYERS:
        for position in POSITIONS:
            logits[layer, position] = run(CORRUPT, {layer: replaced(layer, position)})
    return logits


def test_activation_patching_is_one_trace(engine: Engine, local: Local, smollm2_path: Any) -> None:
    model = engine.model
    count = [len(model.tokenizer(prompt).input_ids) for prompt in (CLEAN, CORRUPT)]
    assert count[0] == count[1]
    wanted = by_hooks(local)
    found = patched(engine, lambda: model.trace(temperature=0.0, max_tokens=1))
    assert_same(found, wanted, "the engine's")
    spread = torch.stack([found[layer, -1][0] for layer in LAYERS]).std(dim=0).max()
    assert spread > 0.1, "every place gave the same, so it showed nothing"


def test_the_same_text_runs_in_this_process(engine: Engine, local: Local) -> None:
    """The reference of the test above, with nnsight_pp in place of hooks."""
    again = Local.__new__(Local)
    again.model = LanguageModel(local.model._module, tokenizer=local.tokenizer)
    again.layers = list(again.model.model.layers)
    with torch.no_grad():
        found = patched(again, again.model.trace)
    assert_same(found, by_hooks(local), "this process's")


def test_two_invokes_exchange_a_value_at_one_layer(engine: Engine, local: Local) -> None:
    model, layers, ops = engine.model, engine.layers, engine.ops
    for layer in (5, 20):
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(CLEAN):
                h = ops.mlp(layers[layer])
                mine = h[-1].clone()
                barrier()
                h[-1] = theirs  # noqa: F821 - the other invoke binds it
                first = model.logits.save()
            with tracer.invoke(CORRUPT):
                h = ops.mlp(layers[layer])
                theirs = h[-1].clone()
                barrier()
                h[-1] = mine
                second = model.logits.save()
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(CLEAN):
                one = ops.mlp(layers[layer])[-1].save()
            with tracer.invoke(CORRUPT):
                two = ops.mlp(layers[layer])[-1].save()
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(CLEAN):
                ops.mlp(layers[layer])[-1] = two
                wanted_first = model.logits.save()
            with tracer.invoke(CORRUPT):
                ops.mlp(layers[layer])[-1] = one
                wanted_second = model.logits.save()
        assert_same(first, wanted_first, f"layer {layer}, first")
        assert_same(second, wanted_second, f"layer {layer}, second")


def test_two_loops_share_a_dictionary_beside_one_that_shares_nothing(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(temperature=0.0, max_tokens=3) as tracer:
        sums, counts = {}.save(), [].save()
        with tracer.invoke(CLEAN):
            for step in tracer.iter[:3]:
                late = layers[20].mlp.output[-1]
                sums[step] = float(late.sum())
        with tracer.invoke(CORRUPT):
            for step in tracer.iter[:3]:
                h = layers[22].mlp.output
                counts.append((len(sums), sums[step]))
                h[-1] += late
            out = tracer.result.save()
        with tracer.invoke(SHORT):
            logits = model.logits.save()
    assert [count for count, _ in counts] == [1, 2, 3]
    assert [value for _, value in counts] == [sums[0], sums[1], sums[2]]
    assert len(out.outputs[0].token_ids) == 3
    with model.trace(SHORT, temperature=0.0, max_tokens=1):
        alone = model.logits.save()
    assert_same(logits, alone, "the one beside")


def test_a_request_that_ends_first_still_gives_what_it_bound(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(CLEAN, max_tokens=1):
            late = layers[25].mlp.output
        with tracer.invoke(CORRUPT, max_tokens=4):
            seen = [].save()
            for step in tracer.iter[:4]:
                h = layers[2].mlp.output
                if step:
                    h[-1] += late[step]
                model.logits
                seen.append(late[step])
    with model.trace(CLEAN, temperature=0.0, max_tokens=1):
        wanted = layers[25].mlp.output.save()
    assert_same(torch.stack(list(seen)), wanted[:4], "late")


def test_those_that_share_nothing_begin_in_one_step_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, model, layers = engine.ops, engine.model, engine.layers
    batches: list[Batch] = []

    def kept(*args: Any, **options: Any) -> Batch:
        batches.append(Batch(*args, **options))
        return batches[-1]

    monkeypatch.setattr(client, "Batch", kept)
    with model.trace(max_tokens=1) as tracer:
        for layer in range(6):
            with tracer.invoke(PROMPT):
                last = ops.mlp(layers[layer])[-1].save()
    assert last.shape == (576,)
    (batch,) = batches
    assert not batch._companies
    assert list(batch.most_in_step.values()) == [6] * 6


def test_an_error_ends_all_that_share_names_and_nobody_else(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    rows = []
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(temperature=0.0, max_tokens=2) as tracer:
            with tracer.invoke(CLEAN):
                value = layers[20].mlp.output[-1]
                1 / 0
            with tracer.invoke(CORRUPT):
                layers[25].mlp.output
                rows.append(value)
            with tracer.invoke(SHORT):
                other = model.logits.save()
    assert not rows
    assert other.shape[0] == 1, "what shares nothing came home"
    assert not isinstance(caught.value, ValueUnavailableError)
    with pytest.raises(NameError, match="has not come that far"):
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            with tracer.invoke(CLEAN):
                value = layers[20].mlp.output
            with tracer.invoke(CORRUPT):
                layers[3].mlp.output[:] = value


def test_what_cannot_run_together_is_refused(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens"):
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            rows = {}
            for _ in range(3):
                with tracer.invoke(" ".join([LONGER] * 11)):
                    rows[len(rows)] = layers[3].mlp.output[-1]
    with pytest.raises(BarrierError, match="never reached"):
        with model.trace(temperature=0.0, max_tokens=1) as tracer:
            barrier = tracer.barrier(3)
            for prompt in (CLEAN, CORRUPT):
                with tracer.invoke(prompt):
                    barrier()
    with pytest.raises(NotSupportedError, match="stop"):
        with model.trace(temperature=0.0, max_tokens=2) as tracer:
            with tracer.invoke(CLEAN):
                value = layers[3].mlp.output
                tracer.stop()
            with tracer.invoke(CORRUPT):
                h = layers[3].mlp.output
                h[:] = value


def test_an_interrupted_run_leaves_nothing_of_a_company(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layers = engine.model, engine.layers
    assert model._llm is not None
    core = model._llm.llm_engine
    step, calls = core.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with model.trace(temperature=0.0, max_tokens=40, ignore_eos=True) as tracer:
            with tracer.invoke(CLEAN):
                for _ in tracer.iter[:40]:
                    m = layers[-1].mlp.output
            with tracer.invoke(CORRUPT):
                for _ in tracer.iter[:40]:
                    h = layers[-1].mlp.output
                    h[-1] += m[-1]
    monkeypatch.undo()
