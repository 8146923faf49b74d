"""Requests that come to an engine and leave it while others run, at steps of the test's choice.

The engine must schedule in this process: then a step of it is a step here, and runs are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

if TYPE_CHECKING:
    from nnsight_pp import VLLM

# Plain requests count from here, traced ones from 0.
_FIRST_PLAIN = 10_000


@dataclass
class Plan:
    """When requests come and go, in engine steps.

    Attributes:
        delays: For each request of the trace, in order: after how many steps it comes.
        plain: Requests without a block: after how many steps, the prompt, the options.
        aborted: By place among the requests of the trace: after how many steps it is aborted.
        aborted_plain: Likewise, by place in `plain`.
        outputs: What vLLM returned for the plain ones, by place.
        most_in_flight: The most batches that were in the pipeline at a time.
    """

    delays: Sequence[int]
    plain: Sequence[tuple[int, str, dict[str, Any]]] = ()
    aborted: dict[int, int] = field(default_factory=dict)
    aborted_plain: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    most_in_flight: int = 0


class _Driver:
    """Stands between an offline engine's loop and the engine."""

    def __init__(self, model: VLLM, plan: Plan) -> None:
        llm = model._llm
        assert llm is not None
        self.plan = plan
        self.tokenizer = model.tokenizer
        self.engine: Any = llm.llm_engine
        self.add, self.step = self.engine.add_request, self.engine.step
        self.has_unfinished = self.engine.has_unfinished_requests
        scheduler = self.engine.engine_core.engine_core.scheduler
        self.schedule, self.update = scheduler.schedule, scheduler.update_from_output
        self.scheduler = scheduler
        self.num_steps = self.num_in_flight = 0
        self.traced: list[tuple[str, str]] = []  # vLLM's two names of each, once it has come
        self.plain: dict[int, str] = {}
        self.waiting: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def add_later(self, *args: Any, **kwargs: Any) -> str:
        delay = self.plan.delays[len(self.traced) + len(self.waiting)]
        self.waiting.append((delay, args, kwargs))
        return str(args[0])

    def counted_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self.schedule(*args, **kwargs)
        self.num_in_flight += output.total_num_scheduled_tokens > 0
        self.plan.most_in_flight = max(self.plan.most_in_flight, self.num_in_flight)
        return output

    def counted_update(self, output: Any, *args: Any) -> Any:
        self.num_in_flight -= output.total_num_scheduled_tokens > 0
        return self.update(output, *args)

    def is_unfinished(self) -> bool:
        return bool(self.waiting) or self.has_unfinished()

    def one_step(self) -> list[Any]:
        self._let_come()
        gone = self._let_go()
        self.num_steps += 1
        outputs = [*gone, *(self.step() if self.has_unfinished() else [])]
        for output in outputs:
            if int(output.request_id) >= _FIRST_PLAIN:
                self.plan.outputs[int(output.request_id) - _FIRST_PLAIN] = output
        return [output for output in outputs if int(output.request_id) < _FIRST_PLAIN]

    def _let_come(self) -> None:
        for item in list(self.waiting):
            delay, args, kwargs = item
            if delay <= self.num_steps:
                self.waiting.remove(item)
                self.traced.append((args[0], self.add(*args, **kwargs)))
        for place, (delay, prompt, options) in enumerate(self.plan.plain):
            if delay == self.num_steps:
                ids = {"type": "token", "prompt_token_ids": self.tokenizer.encode(prompt)}
                params = SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY)
                self.plain[place] = self.add(str(_FIRST_PLAIN + place), ids, params)

    def _let_go(self) -> list[Any]:
        """Abort what the plan says; return what an engine's front end would say of it."""
        now, plan = self.num_steps, self.plan
        names = [self.traced[at][1] for at, when in plan.aborted.items() if when == now]
        names += [self.plain[at] for at, when in plan.aborted_plain.items() if when == now]
        states = [self.engine.output_processor.request_states[name] for name in names]
        said = [one.make_request_output([], None, FinishReason.ABORT, None) for one in states]
        if names:
            self.engine.abort_request(names, internal=True)
        return said


@contextmanager
def arriving(model: VLLM, plan: Plan) -> Iterator[None]:
    """Let the requests of the traces in a `with` come and go as ``plan`` says."""
    driver = _Driver(model, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.engine, "add_request", driver.add_later)
        patch.setattr(driver.engine, "has_unfinished_requests", driver.is_unfinished)
        patch.setattr(driver.engine, "step", driver.one_step)
        patch.setattr(driver.scheduler, "schedule", driver.counted_schedule)
        patch.setattr(driver.scheduler, "update_from_output", driver.counted_update)
        yield
    assert not driver.waiting
