"""One run on an engine: blocks out with their requests, reports in, names bound.

Each invocation is one request. They are checked and encoded before anything starts, and generated
in one batch. Their reports come with their last tokens, or are collected together. A block that
does nothing rides along as a plain request. All are handed to the engine while its scheduler is
paused, so that they begin in one step. Those that depend on each other (`dependence`) must; where
there are several such companies, each gets a batch of its own.
"""

from __future__ import annotations

import pickle
import sys
import uuid
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from vllm import RequestOutput

from nnsight_pp.core.block import Block
from nnsight_pp.core.saved import SavedSet
from nnsight_pp.core.tree import leaves
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.collect import came_home, collect
from nnsight_pp.engines.vllm.company import Member
from nnsight_pp.engines.vllm.conflicts import Made, conflict_of, in_one_order
from nnsight_pp.engines.vllm.dependence import companies_of
from nnsight_pp.engines.vllm.homecoming import located, make_change, own_of
from nnsight_pp.engines.vllm.message import encoded, message_of
from nnsight_pp.engines.vllm.prompts import most_tokens, prompt_of, sampling_params
from nnsight_pp.engines.vllm.root import name_of
from nnsight_pp.engines.vllm.sequences import bound_by, by_sequence
from nnsight_pp.engines.vllm.session_values import name_of_kept
from nnsight_pp.engines.vllm.stored_edits import RequestEdits
from nnsight_pp.engines.vllm.together import generate
from nnsight_pp.envoys.cache_view import CacheView
from nnsight_pp.errors import (
    ConfigurationError,
    EngineDiedError,
    InternalError,
    NotSupportedError,
    explain,
)
from nnsight_pp.trace.names import Names
from nnsight_pp.trace.raised import exception_of
from nnsight_pp.trace.tracer import Invocation
from nnsight_pp.wire.merge import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.report import PullRecord, Report
    from nnsight_pp.engines.vllm.session_values import SessionValues
    from nnsight_pp.engines.vllm.stored_edits import StoredEdits
    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.wire.block_codec import BlockMessage

# How many requests of one run may report with their last tokens.
_MOST_EARLY = 4


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


def without_block(prompt: Any) -> Invocation:
    """Return a request for ``prompt`` without a block of its own."""
    return Invocation(
        (prompt,), {}, Block("<no block>", 2, "    pass\n", ""), Names(()), SavedSet()
    )


def _end_of(sequence: Any) -> End:
    return End(len(sequence.token_ids), sequence.finish_reason, sequence.stop_reason)


@dataclass(slots=True)
class _Request:
    """An invocation on its way."""

    invocation: Invocation
    trace: str
    prompt: dict[str, Any]
    options: dict[str, Any]
    edits: RequestEdits
    adapter: Any = None  # vLLM's LoRARequest
    message: BlockMessage | None = None
    params: Any = None  # vLLM's SamplingParams

    @property
    def num_sequences(self) -> int:
        """How many sequences its prompt is sampled for."""
        return self.options.get("n") or 1

    @property
    def last_step(self) -> int | None:
        """The step that ends it at the latest; None where its report has to wait for the client."""
        if self.num_sequences > 1 or self.edits.traces():
            return None
        most = most_tokens(self.options)
        return sys.maxsize if most is None else most - 1

    @property
    def is_plain(self) -> bool:
        """Whether it has no block."""
        return self.message is None

    def messages(self) -> list[BlockMessage]:
        """Return its stored edits and its own block, in the order in which they are served."""
        return [*self.edits.messages, *([] if self.message is None else [self.message])]


@final
class Batch:
    """The requests of one run.

    Args:
        root: The model that the blocks run beside.
        invocations: One for each request.
        options: Sampling parameters of the whole trace; an invocation's own win.
        stored: The blocks that each request begins with.
        session: What the names of the blocks are kept for.
        of_model: The relative precision of the model's values, and how many stages it has.

    Raises:
        ConfigurationError: Something that is not one prompt.
        TypeError: A sampling parameter that vLLM does not know.
    """

    def __init__(
        self,
        root: Envoy,
        invocations: Sequence[Invocation],
        options: dict[str, Any],
        stored: StoredEdits,
        session: SessionValues | None = None,
        *,
        of_model: tuple[float, int] = (torch.finfo(torch.float32).eps, 1),
    ) -> None:
        self._root = root
        self._precision, self._num_stages = of_model
        self._session = session
        companies = companies_of(invocations)
        beside = {at: [invocations[other] for other in one] for one in companies for at in one}
        self._requests = [
            self._prepared(one, options, stored, beside.get(number, ()))
            for number, one in enumerate(invocations)
        ]
        # Those that depend on each other; what depends on nobody.
        self._companies = [[self._requests[number] for number in one] for one in companies]
        self._loose = [one for number, one in enumerate(self._requests) if number not in beside]
        self._messages = [message for one in self._requests for message in one.messages()]
        if len(self._messages) > 1 or any(one.num_sequences > 1 for one in self._requests):
            for seat, message in enumerate(self._messages):
                message.seat = seat
        # Many small answers would be slower than one.
        may_come_home = session is None and len(self._requests) <= _MOST_EARLY
        for request in self._loose:
            self._encode([request], root, may_come_home=may_come_home)
        for members in self._companies:
            self._encode(members, root)
        self._home = Home(own_of(self._messages))
        # The requests whose reports came home with their last tokens.
        self.came_home: list[str] = []
        # What each stage has pulled for the blocks of this run, once it is over.
        self.pulls: list[tuple[int, PullRecord]] = []
        # By trace: how many requests the fullest step of a block's request has held.
        self.most_in_step: dict[str, int] = {}
        # How each request has ended; one for each sequence.
        self.ends: list[End] = []
        self.outputs: list[Any] = []

    def _prepared(
        self, invocation: Invocation, options: Any, stored: Any, beside: Sequence[Invocation]
    ) -> _Request:
        trace = uuid.uuid4().hex
        merged = {**options, **invocation.kwargs}
        adapter = merged.pop("lora_request", None)
        edits = RequestEdits.of(trace, stored.chosen(merged.pop("edits", None)))
        prompt = prompt_of(invocation.inputs, trace)
        request = _Request(invocation, trace, prompt, merged, edits, adapter)
        block = invocation.block
        if not block.does_nothing():
            session = "" if self._session is None else self._session.name
            request.message = message_of(trace, invocation, session, beside)
        return request

    def _encode(
        self, requests: list[_Request], root: Envoy, *, may_come_home: bool = False
    ) -> None:
        """Give ``requests`` their parameters, with their blocks on board."""
        messages = [one.message for one in requests if one.message is not None]
        most = max(one.num_sequences for one in requests)
        if len(requests) > 1 and most > 1:
            raise NotSupportedError(
                explain(
                    f"n={most} sequences were asked for in an invoke that shares names with "
                    "others.",
                    why="Each sequence runs the block, and the others would not know whose names "
                    "to use.",
                    todo="Use one `tracer.invoke(prompt, seed=...)` for each sequence.",
                )
            )

        def name(obj: Any) -> Any:
            return name_of_kept(obj) or name_of(root, obj)

        may_share = len(requests) == 1 and self._num_stages == 1
        shares = [one.edits.shares_with(one.message, may_share=may_share) for one in requests]
        data = [b""] * len(requests)
        if len(requests) > 1:
            # The first member carries all blocks, so that they share what is one object here.
            data[0] = encoded(messages, name)
        elif messages and not shares[0]:  # else it comes with the edits
            data[0] = encoded(messages[0], name)
        company = uuid.uuid4().hex
        for index, request in enumerate(requests):
            member = Member(company, index, len(requests)) if len(requests) > 1 else None
            last = request.last_step if may_come_home else None
            payload = pickle.dumps((request.trace, data[index], member, last)) if messages else None
            shared = None if member is None else company
            request.params = sampling_params(request.options, payload, shared)
            request.edits.board(request.params, request.message, name, together=shares[index])

    def run(self, llm: Any, call: Callable[..., list[Any]]) -> BaseException | None:
        """Generate, collect, and fill what the invocations bound.

        Args:
            llm: vLLM's offline engine.
            call: Calls a method on every rank and returns their answers.

        Returns:
            The first exception that a block raised, or None.
        """
        outputs: dict[str, Any] = {}
        try:
            waves = [*self._companies] or [[]]
            for members in waves:
                loose = self._loose if members is waves[-1] else []
                outputs.update(_generate(llm, members, loose))
        except BaseException as error:
            self._give_up(llm, call, error)
            raise
        self.ends = [
            _end_of(one) for request in self._requests for one in outputs[request.trace].outputs
        ]
        # What was generated, in the order of the invocations.
        self.outputs = [outputs[request.trace] for request in self._requests]
        reports = came_home(self.outputs, self._home.own)
        self.came_home = list(reports)
        waiting = [(trace, one) for one in self._requests for trace in one.edits.traces()]
        waiting += [
            (one.trace, one)
            for one in self._requests
            if not one.is_plain and one.trace not in reports
        ]
        wanted = [(trace, pickle.dumps(outputs[one.trace])) for trace, one in waiting]
        return self._settle(reports | collect(call, wanted, self._home.own))

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
        traces = [trace for one in self._requests for trace in (*one.edits.traces(), one.trace)]
        collect(call, [(trace, None) for trace in traces])
        if name == "VLLMValidationError":
            raise ConfigurationError(
                explain(
                    f"vLLM refuses the request: {error}",
                    todo="Shorten the prompt, or build the engine with a larger max_model_len.",
                )
            ) from error

    def _settle(self, reports: dict[str, list[Report]]) -> BaseException | None:
        """Fill `Invocation.bound`, change outer objects, warn; return the first error."""
        merged: dict[str, list[Report]] = {}
        for message in self._messages:
            if message.trace not in reports:
                raise InternalError(f"no stage reported on trace {message.trace}")
            merged[message.trace] = by_sequence(
                reports[message.trace], message, self._precision, self._home
            )
        for members in self._companies:
            _fail_together([one.trace for one in members], merged)
        first = self._settle_edits(merged)
        for request in self._requests:
            request.invocation.is_saved = True
            if request.message is None:
                continue
            sequences = merged[request.trace]
            request.invocation.bound = self._bound(request, sequences)
            for report in sequences:
                self._complete((report.saved, report.grown), request)
                for stage, found in report.statistics.items():
                    self.pulls += [(int(stage), record) for record in found.get("pulls", ())]
                    most = max(
                        found.get("most_in_step", 0), self.most_in_step.get(request.trace, 0)
                    )
                    self.most_in_step[request.trace] = most
                if report.failure is not None and first is None:
                    first = exception_of(report.failure)
            for text in dict.fromkeys(text for one in sequences for text in one.warnings):
                warnings.warn(text, UserWarning, stacklevel=7)
        parcels = self._parcels()
        changes = [
            Made((parcel, number), message, name, *one)
            for parcel, message in parcels
            for number, report in enumerate(merged[message.trace])
            for name, found in report.grown.items()
            for one in located(message.names[name], found)
        ]
        conflict = conflict_of(changes, [((parcel, 0), message) for parcel, message in parcels])
        for target, change in in_one_order(changes if conflict is None else ()):
            make_change(target, change)
        return first or conflict

    def _parcels(self) -> list[tuple[Any, BlockMessage]]:
        """Return the blocks, each with what names those with which it has shared objects."""
        company_of = {
            one.trace: -1 - number
            for number, members in enumerate(self._companies)
            for one in members
        }
        found: list[tuple[Any, BlockMessage]] = []
        for number, request in enumerate(self._requests):
            shares = request.edits.is_boarded_together
            found += [(number if shares else one.trace, one) for one in request.edits.messages]
            if request.message is not None:
                found.append((company_of.get(request.trace, number), request.message))
        return found

    def _bound(self, request: _Request, sequences: list[Report]) -> dict[str, Any]:
        """Return what the block has bound that comes back: what it saved; in a session, all."""
        are_many, message = request.num_sequences > 1, request.message
        bound = bound_by([one.saved for one in sequences], sequences, are_many=are_many)
        if self._session is not None and message is not None:
            for value in bound.values():
                request.invocation.saves.mark(value)
            kept = bound_by([one.kept for one in sequences], sequences, are_many=are_many)
            bound.update(self._session.bound(kept, message.names))
        return bound

    def _settle_edits(self, reports: dict[str, list[Report]]) -> BaseException | None:
        """Take in what the stored edits saved; return the first exception of one."""
        errors = []
        for request, output in zip(self._requests, self.outputs, strict=True):
            errors.append(request.edits.settle(reports, self._root))
            output.saves = request.edits.saves
        return next((one for one in errors if one is not None), None)

    def _complete(self, values: Any, request: _Request) -> None:
        """Give what came from the ranks what is only known here."""
        for leaf in leaves(values):
            if isinstance(leaf, CacheView):
                leaf.belongs_to(self._root)
            elif isinstance(leaf, RequestOutput):
                leaf.saves = request.edits.saves


def _generate(llm: Any, members: list[_Request], loose: list[_Request]) -> dict[str, Any]:
    """Return what vLLM says of all these, by trace; ``members`` depend on each other."""
    requests = members + loose
    given = [(request.prompt, request.params, request.adapter) for request in requests]
    outputs = generate(llm, given, num_dependent=len(members))
    return {one.trace: output for one, output in zip(requests, outputs, strict=True)}


def _fail_together(traces: list[str], merged: dict[str, list[Report]]) -> None:
    """Where one of these blocks has failed, leave nothing of the others: they have seen its names.

    The first of them keeps the error: one that only repeats another comes last.
    """
    failures = [one.failure for trace in traces for one in merged[trace]]
    found = [one for one in failures if one is not None]
    if found:
        failure = min(found, key=lambda one: one.is_echo)
        for trace in traces:
            report = merged[trace][0]
            merged[trace] = [replace(report, saved={}, grown={}, failure=failure)]
