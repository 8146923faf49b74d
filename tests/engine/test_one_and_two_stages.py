"""Blocks that no other engine knows, on one stage and on two: the same values, errors, warnings.

The odd ones are written by hand, the random ones by hypothesis. `make fuzz` runs more random ones,
new ones each time: `NNSIGHT_PP_FUZZ` says how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from engine.backends import GAUGES
from engine.compare import assert_same
from engine.odd_blocks import ODD, PROMPT
from engine.shared_objects import put_by_invokes
from engine.written_programs import Program, outcome, programs
from fakes.drawn_programs import Refusals, programs_to_run
from nnsight_pp import VLLM, LanguageModel, NotSupportedError
from soak.runs import Soak, wanted_from


class Engines(list[VLLM]):
    """One stage, two stages, with the same weights."""

    def __repr__(self) -> str:
        return "engines"


@pytest.fixture(scope="module")
def engines(tiny_llama_path: Path) -> Iterator[Engines]:
    started = Engines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_PP_SERVE_SEED", "1")
        try:
            for stages in (1, 2):
                model = VLLM(
                    str(tiny_llama_path),
                    pipeline_parallel_size=stages,
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=128,
                    kv_cache_memory_bytes=64 << 20,
                )
                started.append(model)
                model.dispatch()
            yield started
        finally:
            for model in started:
                model.close()


@pytest.mark.parametrize("name", ODD)
def test_an_odd_block_gives_the_same(name: str, engines: Engines) -> None:
    one, two = (ODD[name](model, list(model.model.layers)) for model in engines)
    assert_same(two, one, name)
    assert engines[1].request_counts() == [0, 0]


def forty_steps(model: VLLM) -> list[Any]:
    """What four requests see, which park inside torch on values that are not there yet."""
    first, last = model.model.layers[0], list(model.model.layers)[-1]
    plain = torch.full((1,), 0.5)
    with model.trace(temperature=0.0, max_tokens=40, ignore_eos=True) as tracer:
        found = [].save()
        for number, prompt in enumerate(["one two three", "the sea is", PROMPT, "four"]):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:40]:
                    early = first.mlp.output
                    attention = last.self_attn.output
                    with torch.no_grad():
                        ones = torch.ones_like(attention)
                    normed = last.post_attention_layernorm.output
                    stacked = torch.stack([normed[0][-1], normed[0][-1] + 1])
                    late = last.mlp.output
                    found.append((number, early, attention, ones, stacked, late, plain + late[-1]))
    return found


def test_parks_inside_torch_never_end_a_rank(engines: Engines) -> None:
    """Without the exchange of torch's thread state this ends in `c10::warn`, by a signal."""
    one, two = (sorted(forty_steps(model), key=lambda row: row[0]) for model in engines)
    assert len(two) == 160
    assert_same(two, one, "steps")
    for _, _, attention, ones, stacked, late, left in two:
        assert torch.equal(ones, torch.ones_like(attention))
        assert torch.equal(stacked[1], stacked[0] + 1)
        assert torch.equal(left, 0.5 + late[-1])
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    for rank in engines[1].statistics():
        assert {name: rank[name] for name in GAUGES if rank.get(name)} == {}


def test_random_programs_give_the_same(engines: Engines) -> None:
    refusals = Refusals()

    @programs_to_run(60)
    @given(program=programs())
    def agree(program: Program) -> None:
        one, two = (outcome(program, model) for model in engines)
        refusals.num_run += 1
        if two.refusal is not None and two.seen != one.seen:
            refusals[two.refusal] += 1
        else:
            assert_same(two.seen, one.seen, f"program ({two.words or one.words})")

    agree()
    refusals.assert_few()


def test_many_requests_of_mixed_kinds_leave_nothing(engines: Engines) -> None:
    """`make soak` runs more, and looks at memory, files and threads."""
    one, two = engines
    soak = Soak(two, wanted_from(one))
    soak.run(60)
    assert len(soak.counts) > 10


def test_what_invokes_put_into_one_list_stands_as_in_this_process(
    engines: Engines, tiny_llama_path: Path
) -> None:
    local = LanguageModel(str(tiny_llama_path), dtype=torch.float32)
    found = [put_by_invokes(local, local.trace(fn="generate", max_new_tokens=3, do_sample=False))]
    for model in engines:
        found.append(put_by_invokes(model, model.trace(temperature=0.0, max_tokens=3)))
    assert found[1:] == found[:1] * 2
    rows, firsts = found[0]
    assert rows[:6] == ["from the start", "a", "b", "b 0 0", "a 0 1", "c 0 1"]
    assert (len(rows), rows[-2:]) == (24, ["b is over", "c is over"])
    assert list(firsts) == ["b", "a", "c", "a is over"]


def test_an_edit_and_a_block_share_their_objects_or_are_refused(engines: Engines) -> None:
    """On stages blocks run ahead of the model, and would not see each other in its order."""
    log, counts, tensor = [], {"edits": 0}, torch.zeros(2)
    for model in engines:
        layers = list(model.model.layers)
        with model.edit(inplace=True):
            log.append(layers[0].mlp.output[-1, :2].clone())
            counts["edits"] += 1
            tensor[0] = 3
        with model.edit(inplace=True):
            counts["edits"] += 1
    one, two = engines
    layers = list(one.model.layers)
    try:
        with one.trace(PROMPT, temperature=0.0, max_tokens=1):
            late = layers[3].mlp.output[-1, :2]
            seen = (len(log), counts["edits"], float(tensor[0])).save()
            kept = log[0].save()
            tensor[1] = float(late[0])
            log.append(late.clone())
        with pytest.raises(NotSupportedError, match="'counts' leads to is changed"):
            with two.trace(PROMPT, temperature=0.0, max_tokens=1):
                two.logits
    finally:
        for model in engines:
            model.clear_edits()
    assert (seen, counts["edits"], len(log)) == ((1, 2, 3.0), 2, 2)
    assert tensor[0] == 3
    assert tensor[1] != 0
    assert torch.equal(kept, log[0])


def test_what_a_stored_edit_adds_comes_home_of_every_request(engines: Engines) -> None:
    for model in engines:
        log: list[str] = []
        counts, layers = {"runs": 0}, list(model.model.layers)
        with model.edit(inplace=True):
            layers[3].mlp.output
            log.append("edit")
        try:
            with model.trace(temperature=0.0, max_tokens=1) as tracer:
                for index in (0, 3):
                    with tracer.invoke(PROMPT):
                        layers[index].mlp.output
                        log.append(f"block {index}")
            assert sorted(log) == ["block 0", "block 3", "edit", "edit"]
            with model.edit(inplace=True):
                layers[3].mlp.output
                counts["runs"] += 1
            with pytest.raises(NotSupportedError, match="'counts' leads to was changed"):
                with model.trace(temperature=0.0, max_tokens=1) as tracer:
                    for index in (0, 3):
                        with tracer.invoke(PROMPT):
                            layers[index].mlp.output
        finally:
            model.clear_edits()
        assert counts == {"runs": 0}
