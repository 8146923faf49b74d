"""The traced requests of one rank: from the bytes that a request carries to its report."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.block import Scope
from nnsight_pp.core.report import Report
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.core.saved import SavedSet
from nnsight_pp.engines.vllm.company import BesideBlock, Company, cut_prompt
from nnsight_pp.engines.vllm.homebound import homeward_of, sent_home
from nnsight_pp.engines.vllm.outer import states_of
from nnsight_pp.engines.vllm.residents import Residents, edited
from nnsight_pp.engines.vllm.traced_request import TracedRequest, name_module, worker_of
from nnsight_pp.errors import EarlyStopException, InternalError
from nnsight_pp.interleave.timeline import Timeline
from nnsight_pp.parallel.class_check import BUILTINS
from nnsight_pp.trace.names import SiblingNames
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, decode_blocks
from nnsight_pp.wire.report_codec import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.protocols import Link, Switch
    from nnsight_pp.engines.vllm import compat
    from nnsight_pp.engines.vllm.company import Member
    from nnsight_pp.engines.vllm.past_edits import PastEdits
    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.worker import Worker
    from nnsight_pp.wire.homeward import Homeward


@final
class Ledger:
    """The traced requests of this rank.

    Args:
        turns: Runs the workers.
        switch: Makes a worker's place for thread-local state.
        object_of: Turns a name that travels in a block's place into this rank's object.
        stage: This rank's stage.
        link: Told when a block cannot even start. None with one stage.
        residents: What the rank keeps for sessions.
        past_edits: Which edits a preempted request would lose.
    """

    def __init__(
        self,
        turns: Interleaver,
        switch: Switch,
        object_of: Callable[[Any], Any],
        stage: int,
        link: Link | None,
        residents: Residents,
        past_edits: PastEdits,
    ) -> None:
        self.past_edits = past_edits
        self._residents = residents
        self._turns = turns
        self._switch = switch
        self._object_of = object_of
        self._stage = stage
        self._link = link
        self._requests: dict[str, TracedRequest] = {}
        self._prepared: dict[str, TracedRequest] = {}
        self.companies: dict[str, Company] = {}

    def get(self, request: str) -> TracedRequest | None:
        """Return the traced request of vLLM's id ``request``, or None for a plain one."""
        return self._requests.get(request)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, given: TracedRequest, data: bytes) -> TracedRequest:
        """Start the worker of a block. A failure is the request's own.

        Args:
            given: Its request, without a worker so far.
            data: The block.

        Returns:
            ``given``, or the one of the same name that `prepare` or `prepare_parcel` has got.
        """
        traced = self._prepared.pop(given.request, None) or self._made(given, data)
        self._requests[traced.request] = traced
        if traced.error is not None:
            self.fail(traced, traced.error)
        elif traced.worker is not None:
            self._turns.add(traced.worker)
        return traced

    def prepare(self, given: TracedRequest, data: bytes) -> None:
        """Do what `add` does before blocks run; nobody is told yet."""
        self._prepared[given.request] = self._made(given, data)

    def _made(self, traced: TracedRequest, data: bytes) -> TracedRequest:
        """Decode a block and make its worker, or note the error."""
        try:
            # vLLM calls this in inference mode, whose tensors do not count their edits.
            with torch.inference_mode(False):
                message = decode_block(data, self._object_of)
            self._begin(traced, message, set())
        except Exception as error:
            traced.error = error
        return traced

    def prepare_parcel(self, parcel: list[TracedRequest], data: bytes) -> None:
        """Do what `add` does before blocks run, for requests whose blocks came in one piece.

        They share the objects around them; each change is told by the first that has the object.
        """
        known: set[int] = set()
        try:
            # vLLM calls this in inference mode, whose tensors do not count their edits.
            with torch.inference_mode(False):
                messages = decode_blocks(data, self._object_of)
            for traced, message in zip(parcel, messages, strict=True):
                traced.parcel, traced.growth = parcel, parcel[0].growth
                self._begin(traced, message, known)
        except Exception as error:
            for traced in parcel:
                traced.error, traced.is_echo = error, traced is not parcel[0]
        self._prepared.update({one.request: one for one in parcel})

    def _begin(self, traced: TracedRequest, message: BlockMessage, known: set[int]) -> None:
        """Make the worker of a block that shares no names with others."""
        name_module(message.names)
        traced.before = states_of(message.names, known)
        self._worker(traced, message, Scope(message.names), SavedSet())

    def _worker(
        self, traced: TracedRequest, message: BlockMessage, scope: Scope, saves: SavedSet
    ) -> Worker:
        """Make the worker that runs the block of ``message`` for ``traced``."""
        scope["__builtins__"] = BUILTINS
        traced.given = self._residents.take_given()
        traced.worker = worker_of(traced, message, scope, saves, self._switch)
        return traced.worker

    def add_member(
        self, request: str, trace: str, prompt_len: int, data: bytes, member: Member
    ) -> TracedRequest:
        """Note a request that others depend on; `start` runs the blocks of all."""
        company = self.companies.get(member.company)
        if company is None:
            company = Company(member.company, member.size, Timeline(self._turns))
            self.companies[member.company] = company
        traced = TracedRequest(request, trace, prompt_len, company=company, seat=member.index)
        self._requests[request] = traced
        company.members[member.index] = traced
        company.data = data or company.data
        return traced

    def start(self, company: Company) -> None:
        """Decode the blocks of ``company`` and start their workers, in the order of the blocks."""
        company.is_started = True
        members = company.in_order()
        known: set[int] = set()
        try:
            # vLLM calls this in inference mode, whose tensors do not count their edits.
            with torch.inference_mode(False):
                messages = decode_blocks(company.data, self._object_of)
            company.data = b""
            for traced, message in zip(members, messages, strict=True):
                names = SiblingNames(
                    company.blocks, traced.seat, message.frame, around=message.around
                )
                name_module(message.names)
                scope = Scope(names, message.names)
                traced.before = states_of(message.names, known)
                traced.growth = members[0].growth
                worker = self._worker(traced, message, scope, company.saves)
                company.blocks.append(BesideBlock(message.block, scope, message.frame, worker))
        except Exception as error:
            self.fail(members[0], error)
            return
        for traced in members:
            assert traced.worker is not None
            company.timeline.add(traced.worker)

    def fail(self, traced: TracedRequest, error: BaseException) -> None:
        """Note an error of ``traced`` that its block did not raise, and of all who depend on it."""
        if traced.error is None:
            traced.error = error
        if self._link is not None:
            self._link.fail(traced.request, f"{type(error).__name__}: {error}")
        beside = [] if traced.company is None else traced.company.in_order()
        for other in beside:
            if other.error is None:
                other.error, other.is_echo = error, True
                if self._link is not None:
                    self._link.fail(other.request, f"{type(error).__name__}: {error}")

    def fail_worker(self, worker: Worker, error: BaseException) -> None:
        """Note an error of the request of ``worker`` that its block did not raise."""
        traced = self._requests.get(worker.request)
        if traced is not None:
            self.fail(traced, error)

    def check_whole(self, traced: TracedRequest, item: compat.Scheduled, ran: str) -> None:
        """Refuse a prompt in pieces, and a preempted request whose edits would be lost."""
        error = cut_prompt(traced.prompt_len, item, ran) or self.past_edits.lost(traced, item, ran)
        if error is not None:
            self.fail(traced, error)

    def requests(self, trace: str | None = None) -> list[TracedRequest]:
        """Return the requests that the client's ``trace`` made, or all."""
        return [one for one in self._requests.values() if trace in (None, one.trace)]

    def end(self, traced: TracedRequest, result: Any) -> None:
        """Let the block of ``traced`` run to its end. `close` it afterwards."""
        try:
            if traced.worker is not None:
                traced.worker.cut = WholeCut()  # what is left to read is the result, as it is
            self._turns.finish(traced.request, result)
        except Exception:
            traced.error = InternalError(traceback.format_exc())

    def close(self, traced: TracedRequest, result: Any) -> Report:
        """Return this stage's report of ``traced``, which has ended, as have all of its parcel.

        `forget` it afterwards.
        """
        try:
            report = self._report(traced, result, homeward_of(traced.parcel or [traced]))
        except Exception:
            failure = failure_of(InternalError(traceback.format_exc()), "", self._stage, 0)
            report = Report(traced.request, self._stage, traced.trace, failure=failure)
        return report

    def report(self, traced: TracedRequest) -> Report:
        """Return this stage's report of ``traced``, whose block is over, and keep it as it is."""
        return self._report(traced, object(), homeward_of([traced]))

    def close_company(self, company: Company, results: dict[str, Any]) -> list[Report]:
        """End the requests of ``company``, forget them, and return this stage's reports of them.

        What one has asked for may be brought for another: all end before any is forgotten.

        Args:
            company: Requests that depend on each other.
            results: By the client's name of a request.
        """
        members = company.in_order()
        reports = []
        try:
            for traced in members:
                if traced.worker is not None:
                    traced.worker.cut = WholeCut()
            company.timeline.end()
            for traced in members:
                self._turns.finish(traced.request, results.get(traced.trace))
            ship = homeward_of(members)
            reports = [self._report(one, results.get(one.trace), ship) for one in members]
        except Exception:
            failure = failure_of(InternalError(traceback.format_exc()), "", self._stage, 0)
            reports = [
                Report(traced.request, self._stage, traced.trace, failure=failure)
                for traced in members
            ]
        for traced in members:
            self.forget(traced)
        return reports

    def forget(self, traced: TracedRequest) -> None:
        """Drop ``traced`` and everything of it on this rank."""
        self._requests.pop(traced.request, None)
        self._turns.drop(traced.request)
        if traced.worker is not None:
            traced.worker.let_go()  # what it has saved may hold lazy values, which hold it
        if traced.company is not None:
            self.companies.pop(traced.company.name, None)

    def _report(self, traced: TracedRequest, result: Any, ship: Homeward) -> Report:
        return _report_of(traced, result, ship, self._stage, self._residents)


def _report_of(
    traced: TracedRequest, result: Any, ship: Homeward, stage: int, residents: Residents
) -> Report:
    """Return what ``stage`` reports of ``traced``."""
    worker, message, scope = traced.worker, traced.message, traced.scope
    error = traced.error
    own = {} if scope is None else scope.own()
    sent = sent_home(traced, own, ship)
    if error is None and worker is not None:
        left = worker.randomness.left_dtype() if worker.randomness is not None else None
        error = worker.error or edited(traced.given) or sent.refused or left
    failure = None
    if error is not None and not isinstance(error, EarlyStopException):
        failed_at = worker.failed_at if worker is not None else 0
        is_echo = worker.is_echo if worker is not None else False
        is_echo = is_echo or (error is traced.error and traced.is_echo)
        failure = failure_of(error, traced.filename, stage, failed_at, is_echo=is_echo)
        if not failure.frames and worker is not None and worker.error_at is not None:
            failure = replace(failure, frames=(worker.error_at.frame(),))
    if worker is None or message is None or scope is None:
        return Report(traced.request, stage, traced.trace, failure=failure)
    return Report(
        traced.request,
        stage,
        traced.trace,
        sent.saved,
        sent.grown,
        failure,
        () if failure is not None else tuple(worker.warnings),
        trail=(worker.asked, worker.trail),
        results=tuple(name for name in sent.saved if own[name] is result),
        statistics=traced.statistics(),
        kept={} if failure else residents.bound(message, traced.request, own, sent.saved),
        homeward=ship,
    )
