"""The local engine: a torch module in this process.

The plainest backend, and the reference that every other one is compared with: values are the live
objects of the forward, edits land in them, and they stay in the autograd graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent

from nnsight_pp.core.rows import BatchCut, Rows, WholeCut
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.serve_point import install_serve_points, module_paths
from nnsight_pp.errors import ConfigurationError, UnknownLocationError, explain
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import VisitClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.worker import Worker
from nnsight_pp.trace.clean import raise_again
from nnsight_pp.trace.gradients import install_backward, refuse_in_backward
from nnsight_pp.trace.tracer import Invocation, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut


class _AbandonedRun(BaseException):
    """Leaves the model's forward when a block has raised. Never reaches the user."""


class NNsight(Envoy):
    """A torch module of this process, with blocks beside its forward.

    Args:
        module: The module. Its parameters and buffers stay where they are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        # The turns of the run that is on.
        self._turns: Interleaver | None = None
        install_backward()
        self._install()

    def _served_modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules that offer values, by path."""
        return module_paths(self._module)

    def _install(self) -> None:
        """Put serve points on what the tree mirrors now."""
        self._gate = Gate()
        install_serve_points(self._served_modules(), self._gate)

    def trace(
        self, *inputs: Any, fn: Callable[..., Any] | str | None = None, **kwargs: Any
    ) -> Tracer:
        """Run the module on ``inputs`` with the block of the `with` beside it.

        Args:
            *inputs: What the module is called with. Without any, `tracer.invoke(...)` gives them.
            fn: What is called instead of the module: a callable, or the name of its method.
            **kwargs: Named arguments of the call.
        """
        return self._trace_from(self, inputs, {"fn": fn, **kwargs})

    def _trace_from(self, node: Envoy, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
        kwargs = dict(kwargs)
        fn = kwargs.pop("fn", None)

        def run(tracer: Tracer, invocations: list[Invocation]) -> BaseException | None:
            module = node._module
            if isinstance(fn, str):
                return self._run(getattr(module, fn), module, invocations)
            return self._run(module if fn is None else fn, module, invocations)

        return Tracer(run, inputs, kwargs, has_input=bool(inputs) or bool(kwargs))

    def _has_new(self, node: Envoy) -> None:
        # Anew for the whole tree: the new module may be one that the tree already holds.
        self._install()

    def _will_skip(self, location: Location) -> None:
        self._gate.is_skipping = self._turns is not None

    def _gate_of_sources(self) -> Gate:
        return self._gate

    def _check_worker(self, worker: Worker, location: Location) -> None:
        refuse_in_backward(worker, location)
        if self._turns is None or worker.turns is not self._turns.asks:
            raise UnknownLocationError(
                explain(
                    f"{location} of another model was used.",
                    where=worker.where(),
                    why="A block runs beside one model, the one whose `trace` it stands in.",
                    todo="Save the value in the other model's trace, and use what was saved.",
                )
            )

    def _call_from_block(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return node._module(*args, **kwargs)  # a run serves only what its own call computes

    def _run(
        self, call: Callable[..., Any], module: torch.nn.Module, invocations: list[Invocation]
    ) -> None:
        args, kwargs, cuts = batch(invocations)
        self._run_call(call, module, (args, kwargs), cuts, invocations)

    def _run_call(
        self,
        call: Callable[..., Any],
        module: torch.nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        cuts: Sequence[Cut],
        invocations: Sequence[Invocation],
    ) -> Any:
        """Make one call with blocks beside it, and return what it returned.

        Args:
            call: What is called.
            module: Where the arguments are moved to.
            arguments: The positional and the named ones.
            cuts: How each block sees the call's values.
            invocations: The blocks.
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
        args, kwargs = _on_device_of(module, arguments)
        switch: Any = thread_state.load()
        turns = self._turns = Interleaver(VisitClock(), switch)
        workers: list[Worker] = []
        result = None
        try:
            for number, (invocation, cut) in enumerate(zip(invocations, cuts, strict=True)):
                worker = _worker(f"invoke {number}", invocation)
                worker.cut = cut
                workers.append(worker)
                turns.add(worker)
            if turns.failed is None:
                self._gate.serve = _serving(turns)
                result = call(*args, **kwargs)
                self._gate.serve = None
                for worker in workers:
                    turns.finish(worker.request, result)
        except _AbandonedRun:
            pass
        finally:
            self._gate.serve = None
            self._gate.running.clear()
            self._gate.open.clear()
            self._gate.is_skipping = False
            failed, turns.failed = turns.failed, None
            for worker in workers:
                turns.drop(worker.request)
                worker.memo = None  # a worker and its greenlet hold each other
            self._turns = None
        _settle(failed, workers, invocations)
        return result


def _serving(turns: Interleaver) -> Callable[[Location, Any], Any]:
    """Return what serves the values that the caller's own thread and turn compute."""
    driver = getcurrent()

    def serve(location: Location, value: Any) -> Any:
        # Not in a call made by a block, nor by another thread: these are not part of the run.
        if getcurrent() is not driver:
            return value
        value = turns.serve(location, value)
        if turns.failed is not None:
            raise _AbandonedRun
        return value

    return serve


def _worker(request: str, invocation: Invocation) -> Worker:
    given = [invocation]

    def run() -> None:
        own = given.pop()  # the worker outlives its names
        try:
            exec(own.block.code(), own.scope)
        finally:
            own.is_over = True

    slot = thread_state.load().new_slot(torch.is_grad_enabled())
    return Worker(request, run, invocation.block.filename, slot, saves=invocation.saves)


def _settle(
    failed: Worker | None, workers: Sequence[Worker], invocations: Sequence[Invocation]
) -> None:
    """Raise what the first block to fail raised, else take what the blocks bound."""
    if failed is not None and failed.error is not None:
        # The traceback of an error holds frames that hold its worker: let go of it here.
        errors = [failed.error]
        for worker in workers:
            worker.error = None
        raise_again(errors.pop())
    for worker, invocation in zip(workers, invocations, strict=True):
        invocation.warnings.extend(worker.warnings)
        invocation.take_bound()


def _on_device_of(module: torch.nn.Module, value: Any) -> Any:
    """Return ``value`` with its tensors on the device of the module's first parameter."""
    first = next(module.parameters(), None)
    if first is None:
        return value
    return map_leaves(
        value, lambda leaf: leaf.to(first.device) if isinstance(leaf, torch.Tensor) else leaf
    )


def batch(
    invocations: Sequence[Invocation],
) -> tuple[tuple[Any, ...], dict[str, Any], list[Cut]]:
    """Join the inputs of several invokes along their first dimension.

    Returns:
        The arguments of the one call, and for each invoke how it sees the call's values. An
        invoke without an input sees the whole batch.

    Raises:
        ConfigurationError: The inputs cannot be joined.
    """
    given = [one for one in invocations if one.inputs or one.kwargs]
    if not given:
        raise ConfigurationError(
            explain(
                "The trace needs an input, and none of its invokes has one.",
                why="An invoke without an input sees the batch of the others.",
                todo="Give at least one `tracer.invoke(...)` an input.",
            )
        )
    if len(given) == 1:
        return given[0].inputs, given[0].kwargs, [WholeCut() for _ in invocations]
    sizes = [_num_rows(one) for one in given]
    total = sum(sizes)
    first = given[0]
    if any(
        len(one.inputs) != len(first.inputs) or set(one.kwargs) != set(first.kwargs)
        for one in given
    ):
        raise ConfigurationError("The invokes of one trace must take the same arguments.")
    args = tuple(
        _joined([one.inputs[index] for one in given]) for index in range(len(first.inputs))
    )
    kwargs = {name: _joined([one.kwargs[name] for one in given]) for name in first.kwargs}
    cuts: list[Cut] = []
    start = 0
    left = iter(sizes)
    for one in invocations:
        if one.inputs or one.kwargs:
            size = next(left)
            cuts.append(BatchCut(Rows(start, size, total)))
            start += size
        else:
            cuts.append(WholeCut())
    return args, kwargs, cuts


def _num_rows(invocation: Invocation) -> int:
    for value in (*invocation.inputs, *invocation.kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    raise ConfigurationError(
        explain(
            "An invoke has no tensor input.",
            why="Batching several invokes joins their tensors along the first dimension.",
            todo="Give each invoke a tensor with a batch dimension.",
        )
    )


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        shapes = {tuple(value.shape[1:]) for value in values}
        if len(shapes) > 1:
            raise ConfigurationError(
                f"Batching invokes needs equal shapes beyond the first dimension, got {shapes}."
            )
        return torch.cat(values)
    if any(value is not values[0] and value != values[0] for value in values):
        raise ConfigurationError(f"The invokes give different options: {values}.")
    return values[0]
