"""Ends a request with its block: at `tracer.stop()`, or when the block has raised.

The last stage knows by then that the block is over, since every stage runs it, and says so beside
the sampled tokens. vLLM's scheduler then finishes the request as at a stop token, whatever
`ignore_eos` and `min_tokens` say: the tokens so far stay, and nobody else is touched.

Where all stages have reported by then, their reports go to the client beside the request's last
token (`early_reports`); the next step tells the ranks so.

It also finds the stop strings of requests with a block: see `TracingScheduler._has_said_stop`.

Source: vllm 0.32.0 config/scheduler.py:get_scheduler_cls takes the name of a class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.whole_prompts import WholePromptScheduler

# What vLLM's outputs of such a request say under `stop_reason`.
STOP_REASON = "the block is over"
_REPORTS = "nnsight_pp reports"


@dataclass
class StepOutput(compat.ModelRunnerOutput):
    """What the last stage returns of a step in which blocks have ended.

    Attributes:
        ended: The ids of the requests whose blocks were over early.
        reports: By request, what all stages report of those that end with this step.
    """

    ended: tuple[str, ...] = ()
    reports: dict[str, list[bytes]] = field(default_factory=dict)


@dataclass
class StepPlan(compat.SchedulerOutput):
    """What the ranks get of a step when reports have come home with the one before.

    Attributes:
        came_home: The ids of their requests, which no rank needs any more.
    """

    came_home: tuple[str, ...] = ()


def with_ended(output: Any, ended: tuple[str, ...], reports: dict[str, list[bytes]]) -> Any:
    """Return ``output``, vLLM's of a step, with what the ranks say of blocks that are over."""
    if not (ended or reports) or type(output) is not compat.ModelRunnerOutput:
        return output
    return StepOutput(**vars(output), ended=ended, reports=reports)


def reports_of(output: Any) -> list[bytes] | None:
    """Take the stages' reports that came home with ``output``, which the client got; or None."""
    found = output.kv_transfer_params
    if not found or _REPORTS not in found:
        return None
    output.kv_transfer_params = None
    return found[_REPORTS]


def send_home(outputs: Any, reports: dict[str, list[bytes]]) -> tuple[str, ...]:
    """Put ``reports`` beside the last tokens of their requests; return the requests.

    Source: vllm 0.32.0 v1/engine/output_processor.py hands on `kv_transfer_params` as they are,
    which only a connector to other engines fills.
    """
    sent = []
    for batch in outputs.values() if reports else ():
        for one in batch.outputs:
            has_room = one.finish_reason is not None and one.kv_transfer_params is None
            if has_room and one.request_id in reports:
                one.kv_transfer_params = {_REPORTS: reports[one.request_id]}
                sent.append(one.request_id)
    return tuple(sent)


class TracingScheduler(WholePromptScheduler):
    """The name that goes into vLLM's `scheduler_cls`.

    It also finishes the requests that the last stage names, and sends their reports home.
    """

    _ended: tuple[str, ...] = ()
    _came_home: tuple[str, ...] = ()
    # What each request with stop strings has said so far.
    _texts: WeakKeyDictionary[Any, Any] | None = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's tokens as vLLM does."""
        if isinstance(model_runner_output, StepOutput):
            self._ended = model_runner_output.ended
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._ended = ()
        if isinstance(model_runner_output, StepOutput):
            self._came_home += send_home(outputs, model_runner_output.reports)
        return outputs

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does, and say in it whose reports have come home."""
        plan = super().schedule(*args, **kwargs)
        if self._came_home:
            plan = StepPlan(**vars(plan), came_home=self._came_home)
            self._came_home = ()
        return plan

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        update = super()._update_request_with_output
        new_token_ids, is_stopped = update(request, new_token_ids, *args, **kwargs)
        if not is_stopped and self._has_said_stop(request, new_token_ids):
            # The front end looks for the string as well, and says that it has stopped there.
            request.status = compat.RequestStatus.FINISHED_LENGTH_CAPPED
            is_stopped = True
        if not is_stopped and request.request_id in self._ended:
            request.status = compat.RequestStatus.FINISHED_STOPPED
            request.stop_reason = STOP_REASON
            is_stopped = True
        return new_token_ids, is_stopped

    def _has_said_stop(self, request: Any, new_token_ids: list[int]) -> bool:
        """Whether a request with a block has now said one of its stop strings.

        vLLM's front end would find it a step too late, when the block has seen another round.
        """
        if not compat.has_stop_strings(request):
            return False
        if self._texts is None:
            self._texts = WeakKeyDictionary()
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = compat.text_of(self.vllm_config, request)
        return text.update(new_token_ids, False) is not None
