"""The local engine: a torch module in this process.

The plainest backend, and the reference that every other one is compared with: values are the live
objects of the forward, edits land in them, and they stay in the autograd graph.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.rows import BatchCut, Rows, WholeCut
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.serve_point import install_serve_points, module_paths
from nnsight_pp.errors import ConfigurationError, explain
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import VisitClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.worker import Worker
from nnsight_pp.trace.clean import without_own_frames
from nnsight_pp.trace.tracer import Invocation, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut


class _Abandoned(BaseException):
    """Leaves the model's forward when a block has raised. Never reaches the user."""


class NNsight(Envoy):
    """A torch module of this process, with blocks beside its forward.

    Args:
        module: The module. Its parameters and buffers stay where they are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._gate = Gate()
        install_serve_points(module_paths(module), self._gate)

    def trace(
        self, *inputs: Any, fn: Callable[..., Any] | str | None = None, **kwargs: Any
    ) -> Tracer:
        """Run the module on ``inputs`` with the block of the `with` beside it.

        Args:
            *inputs: What the module is called with. Without any, `tracer.invoke(...)` gives them.
            fn: What is called instead of the module: a callable, or the name of its method.
            **kwargs: Named arguments of the call.
        """

        def run(tracer: Tracer, invocations: list[Invocation]) -> BaseException | None:
            call = getattr(self._module, fn) if isinstance(fn, str) else fn or self._module
            return self._run(call, invocations, kwargs)

        return Tracer(run, inputs, kwargs, has_input=bool(inputs) or bool(kwargs))

    def _call_from_block(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        serve, self._gate.serve = self._gate.serve, None
        try:
            return node._module(*args, **kwargs)
        finally:
            self._gate.serve = serve

    def _run(
        self,
        call: Callable[..., Any],
        invocations: list[Invocation],
        options: dict[str, Any],
    ) -> None:
        if self._gate.serve is not None:
            raise ConfigurationError(
                explain(
                    "This model is already running a trace.",
                    why="A trace of a model cannot run inside another trace of the same model.",
                    todo="Put both into one trace, or wrap a copy of the model.",
                )
            )
        args, kwargs, cuts = batch(invocations, options)
        turns = Interleaver(VisitClock(), thread_state.load())

        def serve(location: Location, value: Any) -> Any:
            value = turns.serve(location, value)
            if turns.failed is not None:
                raise _Abandoned
            return value

        workers = []
        try:
            result = None
            for number, (invocation, cut) in enumerate(zip(invocations, cuts, strict=True)):
                worker = _worker(f"invoke {number}", invocation)
                worker.cut = cut
                workers.append(worker)
                turns.add(worker)
            if turns.failed is None:
                self._gate.serve = serve
                result = call(*args, **kwargs)
        except _Abandoned:
            pass
        finally:
            self._gate.serve = None
            if turns.failed is None:
                for worker in workers:
                    turns.finish(worker.request, result)
            for worker in workers:
                turns.drop(worker.request)
        _settle(workers, invocations)


def _worker(request: str, invocation: Invocation) -> Worker:
    code, scope = invocation.block.code(), invocation.scope
    slot = thread_state.load().new_slot(torch.is_grad_enabled())
    return Worker(
        request,
        lambda: exec(code, scope),
        invocation.block.filename,
        slot,
        saves=invocation.saves,
    )


def _settle(workers: Sequence[Worker], invocations: Sequence[Invocation]) -> None:
    """Raise what a block raised, else take what the blocks bound."""
    for worker in workers:
        if worker.error is not None:
            raise without_own_frames(worker.error)
    for worker, invocation in zip(workers, invocations, strict=True):
        for text in worker.warnings:
            warnings.warn(text, UserWarning, stacklevel=5)
        invocation.take_bound()


def batch(
    invocations: Sequence[Invocation], options: dict[str, Any]
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
        raise ConfigurationError("None of the invokes has an input.")
    if len(given) == 1:
        kwargs = {**options, **given[0].kwargs}
        return given[0].inputs, kwargs, [WholeCut() for _ in invocations]
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
    for one in invocations:
        position = next((i for i, other in enumerate(given) if other is one), None)
        if position is not None:
            size = sizes[position]
            cuts.append(BatchCut(Rows(start, size, total)))
            start += size
        else:
            cuts.append(WholeCut())
    return args, {**options, **kwargs}, cuts


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
