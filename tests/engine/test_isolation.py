"""What one request's block does reaches no other request of the batch, to the last bit.

The engine's scheduler runs in this process, so that the requests of a trace always form the same
batches: across processes the first may already be in a step of its own when the second arrives,
and another batch shape gives other last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.backends import LONGER, PROMPT, SHORT, Engine

if TYPE_CHECKING:
    from engine.kept_engine import KeptEngine


class UsersOwnError(Exception):
    """An exception class of the user's own file."""


@pytest.fixture(scope="module")
def engine(smollm2_path: Path, kept_engine: KeptEngine) -> Iterator[Engine]:
    with kept_engine.lent(smollm2_path, 2, in_process=True) as engine:
        yield engine


def beside(engine: Engine, what: str) -> list[torch.Tensor]:
    """Return a request's logits of three steps, next to a request that does ``what``."""
    model, layers = engine.model, engine.layers
    saved: list[Any] = []
    with model.trace(temperature=0.0, max_tokens=3) as tracer:
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:3]:
                saved.append(model.logits)
        with tracer.invoke(SHORT):
            if what == "reads":
                values = [layers[index].output for index in range(30)]
            elif what == "edits":
                layers[3].mlp.output[:] = 100
                layers[20].mlp.output = -layers[20].mlp.output
            elif what == "raises early":
                raise UsersOwnError(f"{layers[3].mlp.output.shape[0]} rows")
            elif what == "raises late":
                raise UsersOwnError(f"{layers[27].mlp.output.shape[0]} rows")
            elif what == "is too late":
                early = [layers[20].mlp.output, layers[2].mlp.output]
        with tracer.invoke(LONGER):
            pass
    return saved


def test_neighbours_are_bit_identical_whatever_a_block_does(engine: Engine) -> None:
    calm = beside(engine, "nothing")
    assert len(calm) == 3
    for what in ("reads", "edits", "nothing"):
        for one, other in zip(calm, beside(engine, what), strict=True):
            assert torch.equal(one, other), what


@pytest.mark.parametrize("what", ["raises early", "raises late", "is too late"])
def test_neighbours_of_a_failing_block_are_bit_identical(engine: Engine, what: str) -> None:
    """What the others saved comes home too, into the list of the trace."""
    model, layers = engine.model, engine.layers
    calm = beside(engine, "nothing")
    saved: list[Any] = []
    with pytest.raises(Exception, match=r"rows|already ran past"):
        with model.trace(temperature=0.0, max_tokens=3) as tracer:
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[:3]:
                    saved.append(model.logits)
            with tracer.invoke(SHORT):
                if what == "raises early":
                    raise UsersOwnError(f"{layers[3].mlp.output.shape[0]} rows")
                if what == "raises late":
                    raise UsersOwnError(f"{layers[27].mlp.output.shape[0]} rows")
                early = [layers[20].mlp.output, layers[2].mlp.output]
            with tracer.invoke(LONGER):
                pass
    for one, other in zip(calm, saved, strict=True):
        assert torch.equal(one, other)
    assert engine.model.request_counts() == [0, 0]


def test_a_request_without_a_block_gets_the_same_tokens(engine: Engine) -> None:
    """An untraced request beside a traced one, against the same batch without any block."""
    model, layers = engine.model, engine.layers
    plain = model.generate([PROMPT, SHORT], temperature=0.0, max_tokens=6)
    with model.trace(temperature=0.0, max_tokens=6) as tracer:
        with tracer.invoke(PROMPT):
            out = tracer.result.save()
        with tracer.invoke(SHORT):
            for _ in tracer.iter[:6]:
                layers[12].mlp.output[:] = 3
                layers[22].mlp.output[:] = 3
    assert out.outputs[0].token_ids == plain[0].outputs[0].token_ids
