"""A request with a block on one rank, and the worker that runs the block."""

from __future__ import annotations

import sys
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.growth import Growth
from nnsight_pp.core.raw_writes import WORDS
from nnsight_pp.core.rows import TokenCut
from nnsight_pp.core.surroundings import Surroundings, within
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.imports import modules_in
from nnsight_pp.engines.vllm.members import Field, Seen
from nnsight_pp.interleave.draws import ANYTHING, draws_and_mentions
from nnsight_pp.interleave.randomness import Randomness
from nnsight_pp.interleave.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.core.block import Scope
    from nnsight_pp.core.protocols import Switch
    from nnsight_pp.core.rows import Rows
    from nnsight_pp.core.saved import SavedSet
    from nnsight_pp.engines.vllm.company import Company
    from nnsight_pp.engines.vllm.outer import Before
    from nnsight_pp.parallel.lazy import LazyRemoteTensor
    from nnsight_pp.wire.block_codec import BlockMessage


@dataclass(slots=True)
class TracedRequest:
    """One request with a block.

    Attributes:
        request: vLLM's own id; alike on every rank. A stored edit has one made of it.
        trace: The client's name for it.
        prompt_len: Tokens of its prompt.
        seat: Its place among those that depend on each other.
        message: The decoded block, or None when decoding failed.
        worker: The worker, or None likewise.
        scope: The names that the block has bound.
        before: By name, the shipped objects as they were before the block.
        growth: When what is new in those was put there; one for all that share them.
        error: What went wrong outside of the block.
        is_echo: Whether it only repeats what went wrong in a request beside it.
        parcel: The requests whose blocks came with its own, it among them; empty where it came
            alone.
        company: The requests that depend on it and on which it depends, or None.
        given: The values of earlier traces of its session that it got.
        rows_of: vLLM's id of the request whose rows the block sees.
        has_edited: Whether its block has changed what a cache has seen.
        most_in_step: How many requests, with it, the fullest of its steps has held.
        last_step: The step that ends it at the latest; None where it waits to be collected.
    """

    request: str
    trace: str
    prompt_len: int
    seat: int = 0
    message: BlockMessage | None = None
    worker: Worker | None = None
    scope: Scope | None = None
    before: dict[str, list[Before]] = field(default_factory=dict)
    growth: Growth = field(default_factory=Growth)
    error: BaseException | None = None
    is_echo: bool = False
    parcel: list[TracedRequest] = field(default_factory=list)
    company: Company | None = None
    given: list[LazyRemoteTensor] = field(default_factory=list)
    rows_of: str = ""
    has_edited: bool = False
    most_in_step: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        self.rows_of = self.rows_of or self.request

    @property
    def is_over_early(self) -> bool:
        """Whether its block has raised, or stopped the request."""
        return self.error is not None or (self.worker is not None and self.worker.error is not None)

    def cut_to(self, rows: Rows | None) -> None:
        """Let the worker see these rows of the batch, or none."""
        if self.worker is not None:
            self.worker.cut = None if rows is None else TokenCut(rows)

    def statistics(self) -> dict[str, Any]:
        """Return what a report tells of its steps and its pulls."""
        pulls = () if self.worker is None else tuple(self.worker.pulls.values())
        return {"pulls": pulls, "most_in_step": self.most_in_step}

    @property
    def filename(self) -> str:
        """The block's file."""
        return self.message.block.filename if self.message is not None else ""


def worker_of(
    traced: TracedRequest, message: BlockMessage, scope: Scope, saves: SavedSet, switch: Switch
) -> Worker:
    """Make the worker that runs the block of ``message`` for ``traced``."""
    traced.message, traced.scope = message, scope
    message.block.show_in_tracebacks()
    code, run = message.block.code(), message.block.code_for_stand_ins()
    here = Surroundings.now()
    around = message.surroundings or here
    slot = switch.new_slot(around.grad_enabled)
    context = copy_context()
    context.run(around.set_numpys)
    modules = modules_in(message.names)
    # What it reaches through modules that it imports is not looked for.
    draws, writes_raw = ANYTHING if modules else draws_and_mentions(code, message.names, WORDS)
    for name in message.saved:
        saves.mark(message.names[name])
    worker = Worker(
        traced.request,
        within(around.managers(), lambda: exec(run, scope)),
        message.block.filename,
        slot,
        saves=saves,
        context=context,
        randomness=Randomness(
            message.seed + compat.sequence_of(traced.request),
            python=draws.python,
            numpy=draws.numpy,
            dtype=around.dtype,
            settings=None if around.of_process == here.of_process else around.of_process,
            modules=modules,
        ),
    )
    worker.writes_raw = writes_raw
    if message.seat is not None:
        traced.growth.watch(one for states in traced.before.values() for one in _growing(states))
        worker.note_growth = partial(traced.growth.note, seat=message.seat)
    worker.seat = traced.seat
    worker.rows_of = traced.rows_of
    return worker


def _growing(states: list[Before]) -> Iterator[Any]:
    """Yield the lists and dicts of ``states``, into which several blocks may put something.

    Not those in containers: who puts something there has looked it up, and was run together with
    the others.
    """
    for one in states:
        if issubclass(one.kind, (list, dict)) and all(type(x) in (Field, Seen) for x in one.path):
            yield one.now


def name_module(names: dict[str, Any]) -> None:
    """Let classes of a block belong to a module that this rank has: dataclasses look theirs up."""
    if names.get("__name__", "__main__") not in sys.modules:
        names["__name__"] = "__main__"
