"""Seven requests that share their steps with a block's own, and what they give alone.

The client makes one `Batch` of what a trace holds. Here it makes one of that and of seven more, so
that all run in one generation: three before the block's own requests, four behind them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.backends import LONGER, PROMPT, SHORT
from engine.compare import ChangedNeighbourError, assert_same
from nnsight_pp.engines.vllm import client
from nnsight_pp.engines.vllm.batch import Batch, without_block
from nnsight_pp.engines.vllm.stored_edits import StoredEdits
from nnsight_pp.trace.tracer import Invocation, Tracer

if TYPE_CHECKING:
    from engine.backends import Engine

NUM_BEFORE = 3
NUM_NEIGHBOURS = 7
# Of those, the ones that have a block.
NUM_BEFORE_WITH_BLOCK, NUM_AFTER_WITH_BLOCK = 1, 4


# In place of the names of edits: also those without a name are not run.
_NO_EDITS = ("none",)
# Whatever the trace that they join is told.
_OWN = {"temperature": 0.0, "ignore_eos": True, "n": 1, "seed": None, "edits": _NO_EDITS}


class _EditsOfOthers:
    """The stored edits of the block's own requests."""

    def __init__(self, stored: StoredEdits) -> None:
        self._stored = stored

    def chosen(self, names: Any) -> Any:
        return [] if names is _NO_EDITS else self._stored.chosen(names)


class _Written(list["Invocation"]):
    """The requests of traces that are not run."""

    def trace(self, prompt: str, **options: Any) -> Tracer:
        """Keep the block of the `with`."""

        def keep(_: Tracer, invocations: list[Invocation]) -> None:
            self.extend(invocations)

        return Tracer(keep, (prompt,), {**_OWN, **options}, has_input=True)

    def plain(self, prompt: str, **options: Any) -> None:
        self.append(_anew(without_block(prompt), kwargs={**_OWN, **options}))


def _anew(
    one: Invocation, *, kwargs: dict[str, Any] | None = None, frame: int | None = None
) -> Invocation:
    """Return the request as it was before it ran, with these changes."""
    return Invocation(
        one.inputs,
        one.kwargs if kwargs is None else kwargs,
        one.block,
        one.names,
        one.saves,
        one.frame if frame is None else frame,
    )


def _seven(model: Any) -> _Written:
    """Return requests of mixed kinds for a model of 30 layers; most outlive a block of the table.

    None names anything that a block of the table could change, so none depends on one.
    """
    written = _Written()
    vector = torch.linspace(1, -1, 576)
    written.plain(PROMPT, max_tokens=12)
    with written.trace(LONGER, max_tokens=8) as tracer:
        steered = [].save()
        for step in tracer.iter[:8]:
            model.model.layers[4].output[0][:] += 2 * vector
            model.model.layers[22].output[0][:] -= (step + 1) * vector
            steered.append(model.logits.norm())
    written.plain(SHORT, max_tokens=6, temperature=0.8, seed=5)
    with written.trace(LONGER, max_tokens=3) as tracer:
        rows = [].save()
        for _ in tracer.iter[:3]:
            rows.append([model.model.layers[index].mlp.output[-1] for index in (2, 12, 19, 28)])
    with written.trace(PROMPT, max_tokens=5) as tracer:
        seen = [].save()
        for _ in tracer.iter[:5]:
            early = model.model.layers[5].mlp.output
            model.model.layers[18].mlp.skip(0.5 * early)
            model.model.layers[26].mlp.output[-1] += early[-1]
            seen.append(model.logits)
    with written.trace(SHORT, max_tokens=40) as tracer:
        kept = [].save()
        for step in tracer.iter[:]:
            kept.append(model.model.layers[25].mlp.output[-1])
            if step == 2:
                tracer.stop()
    with written.trace(PROMPT, max_tokens=4, n=2, temperature=0.7, seed=3) as tracer:
        drawn = [].save()
        for _ in tracer.iter[:4]:
            model.model.layers[9].mlp.output[:] *= 1.5
            drawn.append(model.samples)
    # A frame of its own each, as traces with an input have when they run by themselves.
    return _Written(_anew(one, frame=-number) for number, one in enumerate(written, 1))


def _tokens(output: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


class Neighbours:
    """Seven requests of an engine, known by what each gives when nobody is beside it."""

    def __init__(self, engine: Engine) -> None:
        self._written = _seven(engine.model)
        assert len(self._written) == NUM_NEIGHBOURS
        engine.model.dispatch()
        self._alone = [self._give_alone(engine.model, one) for one in self._written]

    @staticmethod
    def _give_alone(model: Any, one: Invocation) -> tuple[list[list[int]], dict[str, Any]]:
        own = _anew(one)
        batch = Batch(model, [own], {}, _EditsOfOthers(StoredEdits()))
        error = batch.run(model._llm, model._call)
        assert error is None, error
        return _tokens(batch.outputs[0]), own.bound

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run what runs in this `with` beside the seven; fail where one is not as it was alone."""
        runs: list[tuple[Batch, list[Invocation]]] = []

        def joined(
            root: Any,
            invocations: list[Invocation],
            options: Any,
            stored: Any,
            session: Any = None,
            **more: Any,
        ) -> Batch:
            guests = [_anew(one) for one in self._written]
            around = [*guests[:NUM_BEFORE], *invocations, *guests[NUM_BEFORE:]]
            batch = Batch(root, around, options, _EditsOfOthers(stored), session, **more)
            runs.append((batch, guests))
            return batch

        error = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "Batch", joined)
            try:
                yield
            except Exception as raised:
                error = raised
        for batch, guests in runs:
            # A trace that is refused before anything runs, runs none of them.
            if batch.outputs:
                after = len(guests) - NUM_BEFORE
                own = batch.most_in_step.values()
                most = max(list(own)[NUM_BEFORE_WITH_BLOCK:-NUM_AFTER_WITH_BLOCK], default=None)
                assert not most or most > 1, "its steps held nobody else"
                self._check([*batch.outputs[:NUM_BEFORE], *batch.outputs[-after:]], guests)
        if error is not None:
            raise error
        assert runs, "nothing ran, so nothing ran beside the seven"

    def _check(self, outputs: list[Any], guests: list[Invocation]) -> None:
        for number, (output, guest) in enumerate(zip(outputs, guests, strict=True), 1):
            tokens, values = self._alone[number - 1]
            found = {name: guest.bound.get(name) for name in values}
            try:
                assert _tokens(output) == tokens, f"neighbour {number} got other tokens"
                assert_same(found, values, f"neighbour {number}")
            except AssertionError as error:
                raise ChangedNeighbourError(str(error)) from None
