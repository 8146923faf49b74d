"""One run on an engine: blocks out with their requests, reports in, names bound.

Each invocation is one request. They are checked and encoded before anything starts, generated in
one batch, and collected together. A block that does nothing rides along as a plain request.
"""

from __future__ import annotations

import pickle
import uuid
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.tree import leaves
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.ledger import apply_change
from nnsight_pp.engines.vllm.prompts import prompt_of, sampling_params
from nnsight_pp.engines.vllm.root import name_of
from nnsight_pp.envoys.cache_view import CacheView
from nnsight_pp.errors import ConfigurationError, EngineDiedError, InternalError, explain
from nnsight_pp.trace.raised import exception_of
from nnsight_pp.wire.block_codec import BlockMessage, encode_block
from nnsight_pp.wire.merge import merge_reports
from nnsight_pp.wire.report_codec import decode_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.report import PullRecord, Report
    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.trace.tracer import Invocation


class End(NamedTuple):
    """How one request has ended.

    Attributes:
        num_tokens: How many tokens vLLM has sampled for it.
        finish_reason: vLLM's word for why it ended.
        stop_reason: What ended it where that is "stop": a token id, a stop string, or
            `schedule.STOP_REASON`.
    """

    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None


def _end_of(output: Any) -> End:
    first = output.outputs[0]
    return End(len(first.token_ids), first.finish_reason, first.stop_reason)


@dataclass(slots=True)
class _Request:
    """An invocation on its way."""

    invocation: Invocation
    trace: str
    prompt: dict[str, Any]
    params: Any  # vLLM's SamplingParams
    names: dict[str, Any]
    is_plain: bool


@final
class Batch:
    """The requests of one run.

    Args:
        root: The model that the blocks run beside.
        invocations: One for each request.
        options: Sampling parameters of the whole trace; an invocation's own win.

    Raises:
        ConfigurationError: Something that is not one prompt.
        TypeError: A sampling parameter that vLLM does not know.
    """

    def __init__(
        self, root: Envoy, invocations: Sequence[Invocation], options: dict[str, Any]
    ) -> None:
        self._root = root
        self._requests = [self._encoded(root, one, options) for one in invocations]
        # What each stage has pulled for the blocks of this run, once it is over.
        self.pulls: list[tuple[int, PullRecord]] = []
        # How each request has ended.
        self.ends: list[End] = []

    @staticmethod
    def _encoded(root: Envoy, invocation: Invocation, options: dict[str, Any]) -> _Request:
        trace = uuid.uuid4().hex
        prompt = prompt_of(invocation.inputs, trace)
        merged = {**options, **invocation.kwargs}
        block = invocation.block
        if block.does_nothing():
            return _Request(invocation, trace, prompt, sampling_params(merged, None), {}, True)
        names = invocation.names.look_up(block.reads())
        saved = tuple(name for name, value in names.items() if value in invocation.saves)
        # Drawn here, so that the user's `torch.manual_seed` decides what the block draws.
        seed = int(torch.randint(1 << 62, ()).item())
        message = BlockMessage(trace, block, names, saved, torch.is_grad_enabled(), seed)
        data = encode_block(message, lambda obj: name_of(root, obj))
        params = sampling_params(merged, pickle.dumps((trace, data)))
        return _Request(invocation, trace, prompt, params, names, False)

    def run(self, llm: Any, call: Callable[..., list[Any]]) -> BaseException | None:
        """Generate, collect, and fill what the invocations bound.

        Args:
            llm: vLLM's offline engine.
            call: Calls a method on every rank and returns their answers.

        Returns:
            The first exception that a block raised, or None.
        """
        prompts = [request.prompt for request in self._requests]
        params = [request.params for request in self._requests]
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        except BaseException as error:
            self._give_up(llm, call, error)
            raise
        self.ends = [_end_of(output) for output in outputs]
        wanted = [
            (request.trace, pickle.dumps(output))
            for request, output in zip(self._requests, outputs, strict=True)
            if not request.is_plain
        ]
        return self._settle(_collect(call, wanted))

    def _give_up(self, llm: Any, call: Callable[..., list[Any]], error: BaseException) -> None:
        """Leave nothing of the run on the engine after ``error``; say it in our words."""
        name = type(error).__name__
        if name == "EngineDeadError":
            raise EngineDiedError(
                explain(
                    "The engine has died.",
                    why=f"vLLM says: {error}",
                    todo="`model.close()`, and run again; its output above says what happened.",
                )
            ) from error
        compat.abort_all(llm)
        _collect(call, [(request.trace, None) for request in self._requests])
        if name == "VLLMValidationError":
            raise ConfigurationError(
                explain(
                    f"vLLM refuses the request: {error}",
                    todo="Shorten the prompt, or build the engine with a larger max_model_len.",
                )
            ) from error

    def _settle(self, reports: dict[str, list[Report]]) -> BaseException | None:
        """Fill `Invocation.bound`, change outer objects, warn; return the first error."""
        first: BaseException | None = None
        for request in self._requests:
            request.invocation.is_saved = True
            if request.is_plain:
                continue
            if request.trace not in reports:
                raise InternalError(f"no stage reported on trace {request.trace}")
            report = merge_reports(reports[request.trace])
            for leaf in leaves((report.saved, report.grown)):
                if isinstance(leaf, CacheView):
                    leaf.belongs_to(self._root)
            request.invocation.bound = report.saved
            for stage, found in report.statistics.items():
                self.pulls += [(int(stage), record) for record in found.get("pulls", ())]
            for name, change in report.grown.items():
                apply_change(request.names[name], change)
            for text in report.warnings:
                warnings.warn(text, UserWarning, stacklevel=7)
            if report.failure is not None and first is None:
                first = exception_of(report.failure)
        return first


def _collect(
    call: Callable[..., list[Any]], wanted: list[tuple[str, bytes | None]]
) -> dict[str, list[Report]]:
    """Return the stages' reports by trace."""
    found: dict[str, list[Report]] = {}
    if not wanted:
        return found
    answers = call("nnsight_collect", pickle.dumps(wanted))
    for report in decode_reports(answers, lambda is_wanted: call("nnsight_fetch", is_wanted)):
        found.setdefault(report.trace, []).append(report)
    return found
