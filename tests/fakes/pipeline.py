"""A pipeline of stages in one process: real workers, interleavers and links, a toy model.

One thread per stage, as greenlets belong to their thread. A scheduler (the calling thread) sends
every stage the same list of orders, as vLLM does: steps of batches, then the end of a request. At
most as many batches are in flight as there are stages, and a request's next step is ordered only
when its last one was sampled.

The toy model has layers over a flat batch ``[T, 3]`` of whole numbers kept in float64, so every sum
is exact and no two ways of computing it may differ. Even layers return a tensor, odd ones a tuple.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fakes.drawing import OneAtATime, YieldingLink, without_other_turns
from nnsight_pp.core.block import Block, Scope
from nnsight_pp.core.location import LOGITS, RESULT, SAMPLES, Location
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.rows import Rows, TokenCut
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import OutOfOrderError
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.barrier import Barrier
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.draws import draws_of
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.randomness import Randomness
from nnsight_pp.interleave.serve_order import ShuffledRequests
from nnsight_pp.interleave.stacks import standing_of
from nnsight_pp.interleave.steps import Steps
from nnsight_pp.interleave.timeline import Timeline
from nnsight_pp.interleave.worker import Worker, current_worker
from nnsight_pp.parallel.lazy import LazyRemoteTensor, first_input, pick, with_first_input
from nnsight_pp.parallel.memory_link import MemoryFabric, MemoryLink
from nnsight_pp.parallel.owners import StageMap
from nnsight_pp.parallel.pulled import OwnConstant
from nnsight_pp.trace.names import SiblingNames

if TYPE_CHECKING:
    from nnsight_pp.core.report import PullRecord
    from nnsight_pp.core.standing import Standing

NUM_LAYERS = 5
BOUND_S = 20.0
ELSEWHERE = "<elsewhere>"


def layer_path(index: int) -> str:
    return f"model.layers.{index}"


GHOST = "model.layers.2.ghost"  # known, and never computed


class Place:
    """What a program calls ``L[i]``, ``ghost`` or ``model``."""

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def __getattr__(self, kind: str) -> Any:
        worker = current_worker(self._path)
        if kind == "weight":
            location = Location(self._path, kind)
            ask = worker.turns.constant(worker, location)
            own = OwnConstant(location, weight(str(location))) if ask is None else ask
            return LazyRemoteTensor(own)
        if kind == "input":
            inputs = worker.turns.read(worker, Location(self._path, "input"))
            return first_input(inputs)
        return worker.turns.read(worker, Location(self._path, kind))

    def __setattr__(self, kind: str, value: Any) -> None:
        worker = current_worker(self._path)
        location = Location(self._path, kind)
        if kind == "input":
            value = with_first_input(worker.turns.read(worker, location), value)
        worker.turns.write(worker, location, value)

    def __call__(self, value: Any) -> Any:
        worker = current_worker(self._path)
        return worker.turns.call(worker, self._path, value, lambda given: called(self._path, given))


def called(path: str, value: torch.Tensor) -> torch.Tensor:
    """Return what a call of the layer at ``path`` from a block gives; it draws, as dropout does."""
    with without_other_turns():
        torch.rand(2)
    if value.shape[-1] != 3:
        raise ValueError(f"the last size is {value.shape[-1]}, not 3")
    return torch.remainder(value * 3 + int(path[-1]) + 1, 97.0)


def weight(location: str) -> torch.Tensor:
    """Return the constant of a printed location."""
    layer = int(Location.parse(location).path[-1])
    return torch.arange(6, dtype=torch.float64).reshape(2, 3) + layer


def result() -> Any:
    worker = current_worker("result")
    return worker.turns.read(worker, RESULT)


@dataclass
class Request:
    """One prompt with one program."""

    name: str
    source: str
    token: int
    num_rows: int
    most_steps: int
    is_drawing: bool = False
    # Requests of one company share names, ``bag`` and ``barrier``, and run in the same steps.
    company: str = ""


@dataclass
class Outcome:
    """What came of one request, merged over the stages."""

    tokens: list[int] = field(default_factory=list)
    saved: Any = None
    error: tuple[str, int] | None = None
    asked: set[tuple[int, int]] = field(default_factory=set)
    was_held_up: bool = False
    # What the error says.
    words: str = ""
    # Of each stage.
    pulls: list[list[PullRecord]] = field(default_factory=list)

    def seen(self) -> Any:
        """Return what a user sees: an error hides the rest."""
        return self.error or (self.saved, self.tokens)


def stage_map(num_stages: int, *, with_order: bool = True) -> StageMap:
    real: list[set[str]] = [set() for _ in range(num_stages)]
    order: list[list[Location]] = [[] for _ in range(num_stages)]
    for index in range(NUM_LAYERS):
        stage = stage_of(index, num_stages)
        real[stage].add(layer_path(index))
        order[stage] += [Location(layer_path(index), kind) for kind in ("input", "output")]
    known = {GHOST, *(path for paths in real for path in paths)}
    return StageMap(real, real, known, order=order if with_order else ())


def stage_of(layer: int, num_stages: int) -> int:
    return layer * num_stages // NUM_LAYERS


# ------------------------------------------------------------------ a stage


@dataclass
class BesideBlock:
    """One block of a company, as the names of the others see it."""

    block: Block
    scope: Scope
    worker: Worker
    frame: int = 0

    @property
    def is_over(self) -> bool:
        return self.worker.has_ended


class StageCompany:
    """Blocks that share names, on one stage."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.blocks: list[BesideBlock] = []
        self.objects: dict[str, Any] = {"bag": [], "barrier": Barrier(2)}


class Stage:
    """One stage: its thread, its interleaver, its layers."""

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        self.pipeline = pipeline
        self.number = number
        self.orders: queue.Queue[Any] = queue.Queue()
        self.arriving: queue.Queue[Any] = queue.Queue()
        self.random = random.Random(f"{pipeline.seed} {number}")
        self.layers = [
            layer for layer in range(NUM_LAYERS) if stage_of(layer, pipeline.num_stages) == number
        ]
        self.scopes: dict[str, Scope] = {}
        self.companies: dict[str, StageCompany] = {}
        self.statistics: dict[str, int] = {}
        self.thread = threading.Thread(target=self._main, name=f"stage {number}", daemon=True)

    def _main(self) -> None:
        try:
            self._run()
        except BaseException:
            self.pipeline.broke(f"stage {self.number}:\n{traceback.format_exc()}")

    def _run(self) -> None:
        pipeline = self.pipeline
        self.switch = thread_state.load()
        self.turns = Interleaver(
            StepClock(),
            self.switch,
            stage=self.number,
            owners=pipeline.owners,
            link=YieldingLink(pipeline.links[self.number]) if pipeline.links else None,
            make_lazy=LazyRemoteTensor,
            where=f"stage {self.number}",
            arrange=ShuffledRequests(f"{pipeline.seed} {self.number}"),
        )
        self.turns.asks.let_go.at_least = self.random.randint(1, 9)
        while (order := self.orders.get()) is not None:
            kind, *arguments = order
            getattr(self, kind)(*arguments)
        self.statistics = self.turns.statistics()

    def standing(self, request: str) -> Standing:
        return standing_of(self.turns, request)

    def pause(self) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * self.pipeline.delay_s)

    def step(self, batch: list[tuple[Request, int, int]]) -> None:
        """Run one step: ``batch`` holds each request with its step and its token."""
        activations = None
        # A call is answered alike only when the stages before this one are through the step.
        if self.number and (not self.pipeline.opens_early or self.random.random() < 0.5):
            activations = self.arriving.get(timeout=BOUND_S)
        for request, step, _ in batch:
            if request.company:
                continue
            if request.name not in self.scopes:
                self._add(request)
            self.turns.catch_up(request.name)
            self.turns.open_step(request.name, step)
            self.pause()
        for name in dict.fromkeys(request.company for request, _, _ in batch if request.company):
            self._open_together(name, [one for one in batch if one[0].company == name])
        with torch.inference_mode():
            if self.number == 0:
                activations = _embedded(batch)
            elif activations is None:
                activations = self.arriving.get(timeout=BOUND_S)
            self._cut(batch)
            value = self._forward(activations)
            if self.number < self.pipeline.num_stages - 1:
                self._close(batch)
                self.pause()
                self.pipeline.stages[self.number + 1].arriving.put(value)
                return
            samples = self._sample(batch, value)
        self._close(batch)
        self.pipeline.sampled.put([int(sample) for sample in samples])

    def _open_together(self, name: str, batch: list[tuple[Request, int, int]]) -> None:
        batch = sorted(batch, key=lambda one: one[0].name)
        if name not in self.companies:
            company = self.companies[name] = StageCompany(Timeline(self.turns))
            workers = [self._made(request, company) for request, _, _ in batch]
            for worker in workers:
                company.timeline.add(worker)
        timeline = self.companies[name].timeline
        timeline.settle()
        self.pause()
        timeline.open_step([request.name for request, _, _ in batch], batch[0][1])
        self.pause()

    def _forward(self, value: Any) -> Any:
        for layer in self.layers:
            self.pause()
            path = layer_path(layer)
            (value,), _ = self.turns.serve(Location(path, "input"), ((value,), {}))
            value = torch.remainder(value * 3 + layer + 1, 97.0)
            if layer % 2:
                hidden, rest = self.turns.serve(
                    Location(path, "output"), (value, torch.remainder(value * 5, 97.0))
                )
                value = torch.remainder(hidden + rest, 97.0)
            else:
                value = self.turns.serve(Location(path, "output"), value)
        return value

    def _sample(self, batch: list[tuple[Request, int, int]], value: torch.Tensor) -> Any:
        ends = torch.tensor([rows.start + rows.count - 1 for rows in _rows(batch)])
        for index, (request, _, _) in enumerate(batch):
            self._worker(request).cut = TokenCut(Rows(index, 1, len(batch)))
        logits = torch.cat([value[ends], value[ends] + 1], dim=1)
        logits = self.turns.serve(LOGITS, logits)
        samples = torch.remainder(logits.sum(dim=1, keepdim=True), 11).long()
        return self.turns.serve(SAMPLES, samples)

    def _close(self, batch: list[tuple[Request, int, int]]) -> None:
        if self.pipeline.links:
            kept = self.pipeline.links[self.number].statistics()["published"]
            self.pipeline.most_kept = max(self.pipeline.most_kept, kept)
        for request, step, _ in batch:
            self._worker(request).cut = None
            self.turns.close_step(request.name, step)

    def _cut(self, batch: list[tuple[Request, int, int]]) -> None:
        for (request, _, _), rows in zip(batch, _rows(batch), strict=True):
            self._worker(request).cut = TokenCut(rows)

    def _worker(self, request: Request) -> Worker:
        return next(w for w in self.turns.workers() if w.request == request.name)

    def _add(self, request: Request) -> None:
        self.turns.add(self._made(request, None))

    def _made(self, request: Request, company: StageCompany | None) -> Worker:
        """Return the worker of ``request``, not started yet."""
        shared: dict[str, Any] = {} if company is None else company.objects
        beside = [] if company is None else [SiblingNames(company.blocks, len(company.blocks), 0)]
        scope = Scope(
            *beside,
            {
                **shared,
                "L": [Place(layer_path(index)) for index in range(NUM_LAYERS)],
                "model": Place("model"),
                "ghost": Place(GHOST),
                "result": result,
                "steps": Steps(),
                "torch": torch,
                "random": random,
                "numpy": numpy,
                "rows": request.num_rows,
                "OutOfOrderError": OutOfOrderError,
            },
        )
        self.scopes[request.name] = scope
        block = Block(f"<{request.name}>", 2, request.source, "program")
        code = block.code()
        worker = Worker(
            request.name,
            lambda: exec(code, scope),
            block.filename,
            self.switch.new_slot(False),
        )
        if request.is_drawing:
            draws = draws_of(code, scope)
            seed = random.Random(request.name).getrandbits(64)
            drawn = Randomness(seed, python=draws.python, numpy=draws.numpy)
            worker.randomness = OneAtATime(drawn)
        if company is not None:
            worker.seat = len(company.blocks)
            company.blocks.append(BesideBlock(block, scope, worker))
        return worker

    def collect(self, ended: list[tuple[Request, list[int]]], reports: Any) -> None:
        """End requests, one or those of a company, as the client's call does, and report."""
        self.pause()
        company = self.companies.pop(ended[0][0].company, None)
        if company is not None:
            company.timeline.end()
        for request, outcome in ended:
            self.turns.finish(request.name, outcome)
        found = [self._report(request) for request, _ in ended]
        for request, _ in ended:
            self.turns.drop(request.name)
        reports.put(found)

    def _report(self, request: Request) -> dict[str, Any]:
        worker = self._worker(request)
        saved = dict.get(self.scopes.pop(request.name), "out")
        report = {
            "stage": self.number,
            "saved": map_leaves(saved, _shippable),
            "asked": (worker.asked, worker.trail),
            "was_held_up": worker.held_up is not None,
            "pulls": list(worker.pulls.values()),
            "error": None,
        }
        if worker.error is not None:
            place, words = _place(worker), str(worker.error)
            report["error"] = (worker.is_echo, worker.failed_at, self.number, words, place)
        return report


def _shippable(leaf: Any) -> Any:
    if issubclass(type(leaf), RemoteValue):
        if not leaf._is_of_this_rank():
            return ELSEWHERE
        leaf = leaf._real_value()
    return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


def _place(worker: Worker) -> tuple[str, int]:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(worker.error.__traceback__)
        if frame.filename == worker.filename
    ]
    return type(worker.error).__name__, lines[-1] if lines else -1


def _rows(batch: list[tuple[Request, int, int]]) -> list[Rows]:
    counts = [request.num_rows if step == 0 else 1 for request, step, _ in batch]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [Rows(start, count, sum(counts)) for start, count in zip(starts, counts, strict=True)]


def _embedded(batch: list[tuple[Request, int, int]]) -> torch.Tensor:
    pieces = [
        torch.arange(rows.count * 3, dtype=torch.float64).reshape(rows.count, 3) + token
        for (_, _, token), rows in zip(batch, _rows(batch), strict=True)
    ]
    return torch.cat(pieces)


# ------------------------------------------------------------- the pipeline


class Pipeline:
    """All stages and their scheduler. Use it once."""

    def __init__(
        self,
        num_stages: int,
        seed: int,
        *,
        with_order: bool = True,
        opens_early: bool = False,
        delay_s: float = 0.0003,
    ) -> None:
        self.num_stages = num_stages
        self.opens_early = opens_early
        self.seed = seed
        self.delay_s = delay_s
        self.random = random.Random(seed)
        self.owners = stage_map(num_stages, with_order=with_order)
        self.links: list[MemoryLink] = []
        self.fabric: MemoryFabric | None = None
        if num_stages > 1:
            slow = random.Random(seed + 1)
            self.fabric = MemoryFabric(
                num_stages,
                pick,
                lambda value: map_leaves(value, _crossed),
                lambda: slow.random() * delay_s if slow.random() < 0.3 else 0.0,
                weight,
                lambda stage, request: self.stages[stage].standing(request),
            )
            self.links = [MemoryLink(self.fabric, stage, BOUND_S) for stage in range(num_stages)]
        self.sampled: queue.Queue[Any] = queue.Queue()
        self.broken: list[str] = []
        # The most answers that a stage has kept at a time.
        self.most_kept = 0
        self.stages = [Stage(self, number) for number in range(num_stages)]

    def broke(self, text: str) -> None:
        self.broken.append(text)
        self.sampled.put(None)

    def run(self, requests: list[Request]) -> dict[str, Outcome]:
        """Run ``requests`` to their ends; return what came of each."""
        for stage in self.stages:
            stage.thread.start()
        try:
            outcomes = self._schedule(requests)
        finally:
            for stage in self.stages:
                stage.orders.put(None)
            for stage in self.stages:
                stage.thread.join(BOUND_S)
            if self.fabric is not None:
                self.fabric.close()
        assert not self.broken, "\n".join(self.broken)
        return outcomes

    def _schedule(self, requests: list[Request]) -> dict[str, Outcome]:
        outcomes = {request.name: Outcome() for request in requests}
        waiting = _units(requests)
        ready: list[list[Request]] = []
        in_flight: list[list[list[Request]]] = []
        done: list[list[Request]] = []
        while waiting or ready or in_flight or done:
            while waiting and self.random.random() < 0.7:
                ready.append(waiting.pop(0))
            if ready and len(in_flight) < self.num_stages and self.random.random() < 0.8:
                self.random.shuffle(ready)
                size = self.random.randint(1, len(ready))
                batch, ready = ready[:size], ready[size:]
                in_flight.append(batch)
                members = [one for unit in batch for one in unit if not _is_over(one, outcomes)]
                self._order("step", [(one, *_next(one, outcomes[one.name])) for one in members])
            elif in_flight:
                batch = in_flight.pop(0)
                members = [one for unit in batch for one in unit if not _is_over(one, outcomes)]
                for request, token in zip(members, self._samples(), strict=True):
                    outcomes[request.name].tokens.append(token)
                for unit in batch:
                    is_over = all(_is_over(one, outcomes) for one in unit)
                    (done if is_over else ready).append(unit)
            # The engine answers a call only when every step that it was given before is over.
            if done and not in_flight:
                self._collect(done.pop(0), outcomes)
        return outcomes

    def _collect(self, unit: list[Request], outcomes: dict[str, Outcome]) -> None:
        reports: queue.Queue[Any] = queue.Queue()
        ended = [(request, list(outcomes[request.name].tokens)) for request in unit]
        self._order("collect", ended, reports)
        parts = []
        for _ in self.stages:
            try:
                parts.append(reports.get(timeout=BOUND_S))
            except queue.Empty:
                raise AssertionError(f"stuck in collect\n{self.picture()}") from None
        for request, found in zip(unit, zip(*parts, strict=True), strict=True):
            _merge(outcomes[request.name], list(found))

    def _samples(self) -> list[int]:
        try:
            samples = self.sampled.get(timeout=BOUND_S)
        except queue.Empty:
            raise AssertionError(f"stuck in a step\n{self.picture()}") from None
        assert samples is not None, "\n".join(self.broken)
        return samples

    def _order(self, *order: Any) -> None:
        for stage in self.stages:
            stage.orders.put(order)

    def picture(self) -> str:
        """Return who waits for what."""
        lines = [*self.broken]
        for stage in self.stages:
            lines += [f"stage {stage.number}: {worker!r}" for worker in stage.turns.workers()]
        return "\n".join(lines)

    def rest(self) -> dict[str, int]:
        """Return every gauge that is not zero, once the wires are still."""
        found = {}
        for stage in self.stages:
            link = self.links[stage.number].statistics() if self.links else {}
            for name, count in {**stage.statistics, **link}.items():
                if count:
                    found[f"stage {stage.number} {name}"] = count
        return found


def _units(requests: list[Request]) -> list[list[Request]]:
    """Return ``requests``, those of a company together."""
    units: dict[str, list[Request]] = {}
    for request in requests:
        units.setdefault(request.company or f"alone {request.name}", []).append(request)
    return [sorted(unit, key=lambda one: one.name) for unit in units.values()]


def _is_over(request: Request, outcomes: dict[str, Outcome]) -> bool:
    tokens = outcomes[request.name].tokens
    return len(tokens) >= request.most_steps or (bool(tokens) and tokens[-1] == 0)


def _next(request: Request, outcome: Outcome) -> tuple[int, int]:
    step = len(outcome.tokens)
    return step, outcome.tokens[-1] if step else request.token


def _crossed(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _merge(outcome: Outcome, parts: list[dict[str, Any]]) -> None:
    outcome.was_held_up = any(part["was_held_up"] for part in parts)
    outcome.pulls = [part["pulls"] for part in sorted(parts, key=lambda part: part["stage"])]
    failures = sorted(part["error"] for part in parts if part["error"] is not None)
    if failures:
        *_, outcome.words, outcome.error = failures[0]
        return
    outcome.asked = {part["asked"] for part in parts}
    assert len(outcome.asked) == 1, f"stages asked for different things: {outcome.asked}"
    outcome.saved = _merged([part["saved"] for part in parts])


def _merged(values: list[Any]) -> Any:
    real = [value for value in values if not (isinstance(value, str) and value == ELSEWHERE)]
    assert real, "a value that no stage ships"
    first = real[0]
    if isinstance(first, (list, tuple)) and all(isinstance(v, (list, tuple)) for v in real):
        assert len({len(value) for value in real}) == 1, f"different lengths: {real}"
        return [_merged([value[index] for value in real]) for index in range(len(first))]
    assert all(type(v) is type(first) and v == first for v in real), f"stages disagree: {real}"
    return first
