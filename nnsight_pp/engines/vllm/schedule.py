"""Ends a request with its block: at `tracer.stop()`, or when the block has raised.

The last stage knows by then that the block is over, since every stage runs it, and says so beside
the sampled tokens. vLLM's scheduler then finishes the request as at a stop token, whatever
`ignore_eos` and `min_tokens` say: the tokens so far stay, and nobody else is touched.

It also finds the stop strings of requests with a block: see `TracingScheduler._has_said_stop`.

Source: vllm 0.32.0 config/scheduler.py:get_scheduler_cls takes the name of a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.whole_prompts import WholePromptScheduler

# What vLLM's outputs of such a request say under `stop_reason`.
STOP_REASON = "the block is over"


@dataclass
class StepOutput(compat.ModelRunnerOutput):
    """What the last stage returns of a step in which blocks have ended early.

    Attributes:
        ended: The ids of their requests.
    """

    ended: tuple[str, ...] = ()


def with_ended(output: Any, ended: tuple[str, ...]) -> Any:
    """Return ``output``, vLLM's of a step, with the requests whose blocks are over."""
    if not ended or type(output) is not compat.ModelRunnerOutput:
        return output
    return StepOutput(**vars(output), ended=ended)


class TracingScheduler(WholePromptScheduler):
    """The name that goes into vLLM's `scheduler_cls`.

    It also finishes the requests that the last stage names.
    """

    _ended: tuple[str, ...] = ()
    # What each request with stop strings has said so far.
    _texts: WeakKeyDictionary[Any, Any] | None = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's tokens as vLLM does."""
        if isinstance(model_runner_output, StepOutput):
            self._ended = model_runner_output.ended
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._ended = ()

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
