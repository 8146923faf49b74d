"""The same block gives the same on two tensor-parallel ranks as on one process.

The whole table of `blocks.py` and the blocks in standard names against the local model, on a random
Qwen2 whose layers are as many and as wide as SmolLM2's; the blocks about pieces (`sharded.py`,
`sharded_surface.py`) against one rank; the blocks that one rank refuses; and blocks that differ
between the ranks, which must be found and named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import standard_blocks
from engine.backends import PROMPT, SHORT, Engine, Local
from engine.compare import assert_same
from engine.refused_blocks import REFUSED
from engine.sharded import SHARDED, WIDE
from engine.sharded_surface import SURFACE, assert_alike_on_every_rank
from engine.table import BLOCKS
from matrix.cells import RANKS, Kind, Row, judged
from nnsight_pp import LanguageModel, NotSupportedError, RankDivergenceError, RowsError

PIECES = {**SHARDED, **SURFACE}
ALIVE = ("requests", "workers", "parked", "published", "shelves", "waiting", "pending")


@pytest.fixture(scope="module")
def path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    from fakes.models import make_tiny_qwen2

    folder = tmp_path_factory.mktemp("models") / "wide-qwen2"
    return str(make_tiny_qwen2(folder, smollm2_path, **WIDE))


@pytest.fixture(scope="module")
def wanted(path: str) -> dict[str, Any]:
    """What the blocks about pieces give on one rank."""
    engine = Engine(path, 1, in_process=True)
    try:
        return {name: block(engine.model, engine.layers) for name, block in PIECES.items()}
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(path: str, wanted: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(path, 1, tp=2)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def here(path: str) -> Callable[[str], Any]:
    """Returns what a block of the table gives on the model in this process."""
    local = Local(path)

    def values_of(name: str) -> Any:
        with local.context():
            return BLOCKS[name](local)

    return values_of


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    for rank in engine.model.statistics():
        assert {key: rank[key] for key in ("tracked", *ALIVE) if rank.get(key)} == {}


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, engine: Engine, here: Callable[[str], Any]) -> None:
    assert_same(BLOCKS[name](engine), here(name), name)


@pytest.mark.parametrize("name", [name for name, one in REFUSED.items() if RANKS in one.where])
def test_refused_block(name: str, engine: Engine) -> None:
    row = Row(name, REFUSED[name].run, REFUSED[name])
    cell, _ = judged(row, engine, RANKS, None, None)
    assert cell.kind is Kind.REFUSED, cell.why


@pytest.mark.parametrize("name", PIECES)
def test_sharded_block(name: str, engine: Engine, wanted: dict[str, Any]) -> None:
    assert_same(PIECES[name](engine.model, engine.layers), wanted[name], name)


@pytest.fixture(scope="module")
def named(path: str) -> LanguageModel:
    return LanguageModel(path, dtype=torch.float32, dispatch=True)


@pytest.mark.parametrize("name", standard_blocks.BLOCKS)
def test_one_text_in_standard_names(name: str, engine: Engine, named: LanguageModel) -> None:
    run = standard_blocks.BLOCKS[name]
    with torch.no_grad():
        wanted = run(named, standard_blocks.on_language_model(named))
    assert_same(run(engine.model, standard_blocks.on_vllm(engine.model)), wanted, name)


def test_standard_values_are_the_same_on_every_rank(engine: Engine, tmp_path: Path) -> None:
    assert_alike_on_every_rank(engine, tmp_path)


def logits_of(engine: Engine) -> torch.Tensor:
    with engine.trace(PROMPT):
        logits = engine.model.logits.save()
    return logits


def test_a_branch_on_the_process_is_found_and_named(engine: Engine) -> None:
    model, layers = engine.model, engine.layers
    before = logits_of(engine)
    first = min(rank["pid"] for rank in model.statistics())
    with pytest.raises(RankDivergenceError, match="went different ways"):
        with engine.trace(PROMPT):
            layers[1].mlp.output.norm()
            if os.getpid() == first:
                layers[3].self_attn.o_proj.input[:] = 0
            else:
                layers[5].mlp.output[:] = 0
            model.logits.save()
    assert torch.equal(logits_of(engine), before)


def test_a_save_that_differs_between_ranks_is_found_and_named(engine: Engine) -> None:
    layers = engine.layers
    with pytest.raises(RankDivergenceError, match="one tensor-parallel rank has"):
        with engine.trace(PROMPT):
            found = layers[1].mlp.output * os.getpid()
            found.save()


def test_a_rank_that_calls_alone_is_found_and_named(engine: Engine) -> None:
    layers = engine.layers
    first = min(rank["pid"] for rank in engine.model.statistics())
    with pytest.raises(RankDivergenceError, match="called a module"):
        with engine.trace(PROMPT):
            hidden = layers[1].mlp.output
            if os.getpid() == first:
                hidden = layers[1].mlp(hidden)
            layers[3].mlp.output[:] = hidden


def test_an_edit_that_differs_between_ranks_is_found_and_spares_its_neighbour(
    engine: Engine,
) -> None:
    model, layers = engine.model, engine.layers
    alone, beside = [], []
    with pytest.raises(RankDivergenceError, match="wrote different values"):
        with model.trace(temperature=0.0, max_tokens=3) as tracer:
            with tracer.invoke(SHORT):
                layers[2].mlp.output[-1] += os.getpid()
                layers[4].mlp.output.save()
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[:3]:
                    beside.append(model.logits)
    with engine.trace(PROMPT, 3) as tracer:
        for _ in tracer.iter[:3]:
            alone.append(model.logits)
    assert_same(beside, alone)


def test_a_part_assigned_for_the_whole_is_refused(engine: Engine) -> None:
    layers = engine.layers
    with pytest.raises(RowsError, match="was assigned"):
        with engine.trace(PROMPT):
            heads = layers[2].self_attn.o_proj.input
            layers[2].self_attn.o_proj.input = heads[:, : heads.shape[-1] // 2]


def test_an_id_that_no_rank_has_a_row_for_is_refused(engine: Engine) -> None:
    """One rank would fail; several would each leave the row to another, and give zeros."""
    model = engine.model
    with pytest.raises(RowsError, match="token id 1000000"):
        with engine.trace(PROMPT):
            model.model.embed_tokens.input[1] = 10**6


def test_the_weight_of_a_packed_layer_stays_refused(engine: Engine) -> None:
    layers = engine.layers
    with pytest.raises(NotSupportedError, match="repacked"):
        with engine.trace(PROMPT):
            layers[2].self_attn.o_proj.weight.save()
