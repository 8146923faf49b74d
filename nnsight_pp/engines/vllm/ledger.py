"""The traced requests of one rank: from the bytes that a request carries to its report."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.block import Scope
from nnsight_pp.core.report import Report
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.errors import EarlyStopException, InternalError
from nnsight_pp.interleave.randomness import Randomness, draws_of
from nnsight_pp.interleave.worker import Worker
from nnsight_pp.wire.block_codec import BlockMessage, decode_block
from nnsight_pp.wire.report_codec import failure_of, without_remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.protocols import Link, Switch
    from nnsight_pp.interleave.interleaver import Interleaver


@dataclass(slots=True)
class TracedRequest:
    """One request with a block.

    Attributes:
        request: vLLM's own id; alike on every rank.
        trace: The client's name for it.
        prompt_len: Tokens of its prompt.
        message: The decoded block, or None when decoding failed.
        worker: The worker, or None likewise.
        scope: The names that the block has bound.
        before: The shipped lists, dicts, sets and tensors as they were before the block.
        error: What went wrong outside of the block.
    """

    request: str
    trace: str
    prompt_len: int
    message: BlockMessage | None = None
    worker: Worker | None = None
    scope: Scope | None = None
    before: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def is_over_early(self) -> bool:
        """Whether its block has raised, or stopped the request."""
        return self.error is not None or (self.worker is not None and self.worker.error is not None)

    @property
    def filename(self) -> str:
        """The block's file."""
        return self.message.block.filename if self.message is not None else ""


@final
class Ledger:
    """The traced requests of this rank.

    Args:
        turns: Runs the workers.
        switch: Makes a worker's place for thread-local state.
        object_of: Turns a name that travels in a block's place into this rank's object.
        stage: This rank's stage.
        link: Told when a block cannot even start. None with one stage.
    """

    def __init__(
        self,
        turns: Interleaver,
        switch: Switch,
        object_of: Callable[[Any], Any],
        stage: int,
        link: Link | None,
    ) -> None:
        self._turns = turns
        self._switch = switch
        self._object_of = object_of
        self._stage = stage
        self._link = link
        self._requests: dict[str, TracedRequest] = {}

    def get(self, request: str) -> TracedRequest | None:
        """Return the traced request of vLLM's id ``request``, or None for a plain one."""
        return self._requests.get(request)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: str, trace: str, prompt_len: int, data: bytes) -> TracedRequest:
        """Decode a block and start its worker. A failure is the request's own."""
        traced = TracedRequest(request, trace, prompt_len)
        self._requests[request] = traced
        try:
            # vLLM calls this in inference mode, whose tensors do not count their edits.
            with torch.inference_mode(False):
                message = decode_block(data, self._object_of)
            traced.message = message
            message.block.show_in_tracebacks()
            code = message.block.code()
            scope = Scope(message.names)
            traced.scope = scope
            traced.before = _copies(message.names)
            slot = self._switch.new_slot(message.grad_enabled)
            draws = draws_of(code, message.names)
            worker = Worker(
                request,
                lambda: exec(code, scope),
                message.block.filename,
                slot,
                randomness=Randomness(message.seed, python=draws.python, numpy=draws.numpy),
            )
            for name in message.saved:
                worker.saves.mark(message.names[name])
            traced.worker = worker
        except Exception as error:
            self.fail(traced, error)
        else:
            self._turns.add(worker)
        return traced

    def fail(self, traced: TracedRequest, error: BaseException) -> None:
        """Note an error of ``traced`` that its block did not raise."""
        if traced.error is None:
            traced.error = error
        if self._link is not None:
            self._link.fail(traced.request, f"{type(error).__name__}: {error}")

    def fail_worker(self, worker: Worker, error: BaseException) -> None:
        """Note an error of the request of ``worker`` that its block did not raise."""
        traced = self._requests.get(worker.request)
        if traced is not None:
            self.fail(traced, error)

    def of_trace(self, trace: str) -> list[TracedRequest]:
        """Return the requests that the client's ``trace`` made."""
        return [traced for traced in self._requests.values() if traced.trace == trace]

    def close(self, traced: TracedRequest, result: Any) -> Report:
        """End ``traced``, forget it, and return this stage's report of it."""
        try:
            if traced.worker is not None:
                traced.worker.cut = WholeCut()  # what is left to read is the result, as it is
            self._turns.finish(traced.request, result)
            report = self._report(traced)
        except Exception:
            failure = failure_of(InternalError(traceback.format_exc()), "", self._stage, 0)
            report = Report(traced.request, self._stage, traced.trace, failure=failure)
        self.forget(traced)
        return report

    def forget(self, traced: TracedRequest) -> None:
        """Drop ``traced`` and everything of it on this rank."""
        self._requests.pop(traced.request, None)
        self._turns.drop(traced.request)

    def _report(self, traced: TracedRequest) -> Report:
        worker, message, scope = traced.worker, traced.message, traced.scope
        error = traced.error
        if error is None and worker is not None:
            error = worker.error
        failure = None
        if error is not None and not isinstance(error, EarlyStopException):
            failed_at = worker.failed_at if worker is not None else 0
            is_echo = worker.is_echo if worker is not None else False
            failure = failure_of(error, traced.filename, self._stage, failed_at, is_echo=is_echo)
        if worker is None or message is None or scope is None:
            return Report(traced.request, self._stage, traced.trace, failure=failure)
        shipped = {id(value) for value in message.names.values() if _is_outer(value)}
        own = scope.own()
        saved = {
            name: without_remote(own[name])
            for name in sorted(message.block.binds())
            if name in own and own[name] in worker.saves and id(own[name]) not in shipped
        }
        grown = {}
        for name, before in traced.before.items():
            change = _change(before, message.names[name])
            if change is not None:
                grown[name] = without_remote(change)
        return Report(
            traced.request,
            self._stage,
            traced.trace,
            saved,
            grown,
            failure,
            () if failure is not None else tuple(worker.warnings),
            (worker.asked, worker.trail),
            {"pulls": tuple(worker.pulls.values())},
        )


def _is_outer(value: Any) -> bool:
    return type(value) in (list, dict, set) or isinstance(value, torch.Tensor)


def _copies(names: dict[str, Any]) -> dict[str, Any]:
    """Return what is needed to tell later how the block changed objects from around it."""
    found: dict[str, Any] = {}
    for name, value in names.items():
        if isinstance(value, torch.Tensor):
            found[name] = (value, value._version)
        elif type(value) in (list, dict, set):
            found[name] = value.copy()
    return found


def _change(before: Any, after: Any) -> Any:
    """Return how a list, dict, set or tensor has changed, or None.

    A list: ``("list", {index: item}, tail)``, or ``("list=", items)`` when it got shorter.
    """
    if isinstance(after, torch.Tensor):
        return ("tensor", after) if after._version != before[1] else None
    if isinstance(after, list):
        if len(after) < len(before):
            return ("list=", list(after))
        slots = {
            index: after[index] for index, item in enumerate(before) if after[index] is not item
        }
        tail = after[len(before) :]
        return ("list", slots, tail) if slots or tail else None
    if isinstance(after, dict):
        changed = {
            key: value
            for key, value in after.items()
            if key not in before or before[key] is not value
        }
        gone = [key for key in before if key not in after]
        return ("dict", changed, gone) if changed or gone else None
    return ("set", sorted(after, key=repr)) if after != before else None


def apply_change(target: Any, change: Any) -> None:
    """Make on the client's object the change that a block made on a rank's copy of it."""
    kind, *parts = change
    if kind == "tensor":
        with torch.no_grad():
            target.copy_(parts[0])
    elif kind == "list=":
        target[:] = parts[0]
    elif kind == "list":
        for index, item in parts[0].items():
            target[index] = item
        target.extend(parts[1])
    elif kind == "dict":
        target.update(parts[0])
        for key in parts[1]:
            target.pop(key, None)
    else:
        target.clear()
        target.update(parts[0])
