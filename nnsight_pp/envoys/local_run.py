"""Run a module of this process with blocks beside it.

The plainest backend, and the reference that every other one is compared with: values are the live
objects of the forward, edits land in them, and they stay in the autograd graph.
"""

from __future__ import annotations

import contextlib
import warnings
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, final

import torch
from greenlet import getcurrent

from nnsight_pp.core.rows import WHOLE
from nnsight_pp.core.saved import active_saves
from nnsight_pp.core.surroundings import managers_of_thread, within
from nnsight_pp.envoys.cache_view import Cache
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.row_batch import on_device_of
from nnsight_pp.envoys.serve_point import install_serve_points
from nnsight_pp.envoys.tree_node import Forest
from nnsight_pp.errors import (
    ConfigurationError,
    EarlyStopException,
    OutOfOrderError,
    UnknownLocationError,
    explain,
)
from nnsight_pp.interleave import nearby, thread_state
from nnsight_pp.interleave.clock import VisitClock
from nnsight_pp.interleave.interleaver import Interleaver, renew
from nnsight_pp.interleave.worker import Worker
from nnsight_pp.trace.clean import raise_again
from nnsight_pp.trace.gradients import install_backward, refuse_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextvars import Context

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut, Switch
    from nnsight_pp.envoys.edits import Edit
    from nnsight_pp.envoys.renaming import Spelling
    from nnsight_pp.envoys.tree_node import TreeNode
    from nnsight_pp.trace.tracer import Invocation


# The turns of a run, its driver (a greenlet), and what served the values that this computed.
_Spare = tuple[Interleaver, Any, Any]


class _AbandonedRun(BaseException):
    """Leaves the model's forward when a block has raised. Never reaches the user."""


@final
class LocalForest(Forest):
    """The nodes of one module of this process, and its runs, one at a time."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.gate = Gate()
        # The turns of the run that is on, and the node at which it started.
        self._turns: Interleaver | None = None
        self._start: TreeNode | None = None
        # Those of the last run, where that has left nothing behind; its thread, and what served it.
        self._spare: _Spare | None = None
        # The named arguments of the call that is on.
        self.named: Mapping[str, Any] = {}
        self._switch: Any = None  # `thread_state.ThreadState`
        install_backward()

    @property
    def interleaving(self) -> bool:
        """Whether a run with blocks is on."""
        return self._turns is not None

    def added(self, node: TreeNode) -> None:
        """Put serve points on ``node`` and all below it."""
        install_serve_points({one.path: one._module for one in node.nodes()}, self.gate)

    def check(self, worker: Worker, location: Location) -> None:
        """Raise where ``worker`` does not run beside this model."""
        refuse_in_backward(worker, location)
        if worker.turns is None or worker.turns is not self.open_asks:
            raise UnknownLocationError(
                explain(
                    f"{location} of another model was used.",
                    where=worker.where(),
                    why="A block runs beside one model, the one whose `trace` it stands in.",
                    todo="Save the value in the other model's trace, and use what was saved.",
                )
            )

    @contextlib.contextmanager
    def hooking(self) -> Iterator[None]:
        """Serve, in the caller's greenlet, what a block calls, to the other blocks."""
        turns = self._turns
        if turns is None:
            yield
            return
        before, turns.hooking = turns.hooking, getcurrent()
        try:
            yield
        finally:
            turns.hooking = before

    def cache(
        self, worker: Worker, modules: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Any:
        """Return what keeps the values of ``modules`` as ``worker`` sees them, from now on."""
        assert self._turns is not None
        assert self._start is not None
        root = self._start.root
        cache = Cache(root, worker, modules, dict(options))
        self._turns.observers.add(cache.observers(), worker)
        return cache.view()

    def run(
        self,
        start: TreeNode,
        call: Callable[..., Any],
        module: torch.nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        blocks: tuple[Sequence[Cut], Sequence[Invocation]],
        edits: Sequence[Edit],
    ) -> Any:
        """Make one call with blocks beside it, and return what it returned.

        Args:
            start: The node at which the run starts.
            call: What is called.
            module: Where the arguments are moved to.
            arguments: The positional and the named ones.
            blocks: How each block sees the call's values; the blocks.
            edits: Stored blocks, which come first and see everything.
        """
        if self._turns is not None:
            raise ConfigurationError(
                explain(
                    "This model is already running a trace.",
                    why="A trace of a model cannot run inside another trace of the same model, "
                    "nor in another thread at the same time.",
                    todo="Put both into one trace, or wrap the module a second time.",
                )
            )
        args, kwargs = on_device_of(module, arguments)
        cuts, invocations = blocks
        stored = [edit.invocation() for edit in edits] if edits else []
        every = (*stored, *invocations) if edits else invocations
        switch, driver = self._switch or self._loaded_switch(), getcurrent()
        turns, serving = self._opened(driver, switch)
        self._turns = turns
        self._start, turns.asks.surface, self.named = start, self, arguments[1]
        self.open_asks = turns.asks
        workers: list[Worker] = []
        result, is_over = None, False
        try:
            context = None if len(invocations) < 2 else _shared_context(invocations)
            for number, one in enumerate(every):
                worker = _worker(number, len(stored), one, switch, context)
                worker.cut = WHOLE if number < len(stored) else cuts[number - len(stored)]
                workers.append(worker)
                turns.add(worker)
                if turns.failed is not None:
                    break
            if turns.failed is None:
                self.gate.show(turns)
                self.gate.driver = driver
                serving = self.gate.serve = serving or _serving(turns)
                result = call(*args, **kwargs)
                self.gate.serve = None
                for worker in workers:
                    if not worker.has_ended:
                        turns.finish(worker.request, result)
            is_over = True
        except _AbandonedRun:
            is_over = True
        finally:
            failed = self._close(workers, (turns, driver, serving), is_over=is_over)
        _settle(failed, workers, every, len(stored))
        return result

    def _opened(self, driver: Any, switch: Switch) -> tuple[Interleaver, Any]:
        """Return the turns of a run by ``driver``, and what serves it, where that is known."""
        spare, self._spare = self._spare, None
        if spare is None:
            return Interleaver(VisitClock(), switch), None
        turns, last_driver, serving = spare
        return turns, serving if last_driver is driver else None

    def _close(self, workers: Sequence[Worker], run: _Spare, *, is_over: bool) -> Worker | None:
        """End a run, and keep it for the next one if it is clean; return the first to fail."""
        self.gate.close()
        turns, driver, _ = run
        failed, turns.failed = turns.failed, None
        for worker in workers:
            if not worker.has_ended:
                turns.drop(worker.request)
            if worker.greenlet is not None or worker.error is not None:
                worker.let_go()
            worker.memo = None
        if not is_over:
            _unwound(workers)
        if renew(turns) and is_over and failed is None:
            # Not the greenlet of a worker around this run, which lives no longer than that.
            self._spare = run if driver.parent is None else (turns, None, None)
        self._turns = self._start = self.open_asks = None
        self.named = {}
        return failed

    def _loaded_switch(self) -> Any:  # the switches are C functions
        self._switch = thread_state.load()
        return self._switch


def _serving(turns: Interleaver) -> Callable[[Location, Any], Any]:
    """Return what serves the values that the caller's own thread and turn compute."""
    driver = getcurrent()

    def serve(location: Location, value: Any) -> Any:
        # Not in a call made by a block, nor by another thread: these are not part of the run.
        current = getcurrent()
        if current is not driver:
            return turns.serve(location, value) if turns.hooking is current else value
        value = turns.serve(location, value)
        if turns.failed is not None:
            raise _AbandonedRun
        return value

    return nearby.serving(turns, serve, _AbandonedRun)


def _shared_context(invocations: Sequence[Invocation]) -> Context:
    """Return the context variables that the many ``invocations`` see; they save alike.

    A variable that is set anew in each of their contexts costs more than a copy of one where it is.
    """
    context = copy_context()
    context.run(active_saves.set, invocations[0].saves)
    return context


def _worker(
    number: int, num_stored: int, invocation: Invocation, switch: Switch, shared: Context | None
) -> Worker:
    slot = switch.new_slot(torch.is_grad_enabled())
    request = f"invoke {number - num_stored}"
    filename = invocation.block.filename
    context = None if shared is None else shared.copy()
    run = within(managers_of_thread(), invocation.run)
    worker = Worker(request, run, filename, slot, saves=invocation.saves, context=context)
    worker.seat = number
    worker.writes_raw = invocation.block.known.writes_raw
    worker.reaches_raw = invocation.reaches_raw
    return worker


def _settle(
    failed: Worker | None,
    workers: Sequence[Worker],
    invocations: Sequence[Invocation],
    num_stored: int,
) -> None:
    """Raise what the first block to fail raised, else take what the blocks bound.

    A block that stopped the run has not failed; another one may have been left behind by it.
    """
    raised = failed if failed is not None and _has_failed(failed) else None
    for worker in workers:
        if worker.error is not None and raised is None and _has_failed(worker):
            raised = worker
    if raised is not None and raised.error is not None:
        # The traceback of an error holds frames that hold its worker: let go of it here.
        errors = [raised.error]
        for worker in workers:
            worker.error = None
        raise_again(errors.pop())
    for number, worker in enumerate(workers):
        worker.error = None
        if number >= num_stored:
            one = invocations[number]
            if worker.warnings:
                one.warn(worker.warnings)
            one.take_bound()
        elif len(invocations) > num_stored:
            invocations[num_stored].warn(worker.warnings)
        else:
            for text in worker.warnings:
                warnings.warn(text, UserWarning, stacklevel=2)


def _unwound(workers: Sequence[Worker]) -> None:
    """Let go of what the blocks raised when the model's own error had ended them."""
    for worker in workers:
        error, worker.error = worker.error, None
        if error is not None and not isinstance(error, OutOfOrderError):
            warnings.warn(
                f"A block raised {type(error).__name__} ({error}) while it was being unwound, "
                "because the model itself had raised.",
                UserWarning,
                stacklevel=2,
            )


def _has_failed(worker: Worker) -> bool:
    return worker.error is not None and not isinstance(
        worker.error, (EarlyStopException, _AbandonedRun)
    )
