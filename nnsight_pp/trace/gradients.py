"""`with loss.backward():` - a block beside a backward pass, in which `tensor.grad` is a value.

Reading `tensor.grad` in the block parks its worker until autograd has computed that gradient;
setting it replaces what flows on. The order is that of the backward pass: the last values of the
forward come first. A bare `loss.backward()` is torch's own.

A gradient is met in a pre-hook of the graph node that the tensor came from: of the node, not of
the tensor, because a node with several outputs is then met once with all of them, and the block
may ask for these in any order. A worker is given a copy, since autograd hands one buffer to
several consumers; an edited copy is put in its place.

Not here: the tensors themselves stay in the graph because the local engine hands out live objects
(`core.rows`). Where `Tensor.backward` is taught to do this, and why not at import: decisions/0020.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, final

import torch
from torch.autograd.graph import get_gradient_edge

from nnsight_pp.core.location import Location, Visit
from nnsight_pp.core.rows import BatchCut, Rows
from nnsight_pp.core.surroundings import managers_of_thread, within
from nnsight_pp.errors import NotSupportedError, RowsError, Where, explain
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import VisitClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.unwind import out_of_order
from nnsight_pp.interleave.worker import Worker, running_worker
from nnsight_pp.trace.clean import raise_again
from nnsight_pp.trace.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from nnsight_pp.trace.tracer import Invocation

_REQUEST = "backward"


class _AbandonedPass(BaseException):
    """Leaves the backward pass when the block has raised. Never reaches the user."""


@final
class GradientCut:
    """A copy of a gradient, or of one request's rows of it.

    Args:
        rows: Which rows, where the batch holds several requests.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Rows | None) -> None:
        self._rows = rows

    def _share(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            return gradient
        return gradient.narrow(0, self._rows.start, self._rows.count)

    def give(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of this request's rows; in the graph where one is being made."""
        return self._share(value).clone()

    def marks(self, served: torch.Tensor) -> int:
        """Return what tells an edited copy from an untouched one."""
        return served._version

    def check(self, value: torch.Tensor, assigned: Any) -> None:
        """Raise `RowsError` where ``assigned`` is no tensor of the gradient's shape."""
        wanted = list(self._share(value).shape)
        found = list(assigned.shape) if isinstance(assigned, torch.Tensor) else type(assigned)
        if found != wanted:
            raise RowsError(
                explain(
                    f"{found} was assigned to a gradient of shape {wanted}.",
                    why="A gradient has the shape of its tensor.",
                    todo="Assign a tensor of that shape.",
                )
            )

    def put(
        self, value: torch.Tensor, served: torch.Tensor, marks: int, *, assigned: bool
    ) -> torch.Tensor:
        """Return what flows on: the gradient itself, or one with the worker's edits."""
        if not assigned and served._version == marks:
            return value
        new = served.to(value)
        if self._rows is None:
            return new.clone()
        start, count, total = self._rows
        return torch.cat(
            [value[:start], new, value.narrow(0, start + count, total - start - count)]
        )


@final
class _Pass:
    """One backward pass with one block beside it.

    Args:
        turns: The turns between the block and the pass.
        worker: The block's worker.
        outer: The worker whose block this one stands in, if any.
    """

    __slots__ = ("_handles", "_nodes", "_outer", "_turns", "_worker")

    def __init__(self, turns: Interleaver, worker: Worker, outer: Worker | None) -> None:
        self._turns = turns
        self._worker = worker
        self._outer = outer
        # Invariant: nodes are kept alive, so that a tensor asked for again gives the same object.
        self._nodes: dict[Any, dict[int, Location]] = {}
        self._handles: list[Any] = []

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the gradient of ``tensor``; its worker parks until it is there."""
        return self._turns.asks.read(self._worker, self._location_of(tensor))

    def write(self, tensor: torch.Tensor, gradient: Any) -> None:
        """Let ``gradient`` flow on from ``tensor``."""
        self._turns.asks.write(self._worker, self._location_of(tensor), gradient)

    def _location_of(self, tensor: torch.Tensor) -> Location:
        """Return where the gradient of ``tensor`` is met, and see to it that it will be."""
        base, rows = self._base_of(tensor)
        edge = get_gradient_edge(base)
        outputs = self._nodes.get(edge.node)
        if outputs is None:
            outputs = self._nodes[edge.node] = {}
            self._handles.append(
                edge.node.register_prehook(functools.partial(self._reached, outputs))
            )
        location = outputs.get(edge.output_nr)
        if location is None:
            name = f"{edge.node.name()}.{len(self._nodes)}.{edge.output_nr}"
            location = outputs[edge.output_nr] = Location(name, "grad")
        self._worker.cut = GradientCut(rows)
        return location

    def _base_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Rows | None]:
        """Return the tensor that the model went on with where ``tensor`` shows rows of it."""
        cut = None if self._outer is None else self._outer.cut
        if isinstance(cut, BatchCut) and (base := cut.base_of(tensor)) is not None:
            return base, cut.rows
        return tensor, None

    def _reached(self, outputs: dict[int, Location], gradients: tuple[Any, ...]) -> Any:
        """Serve the gradients of one node's outputs, in the order in which they are asked for."""
        flowing = list(gradients)
        left = set(range(len(flowing)))
        while self._turns.failed is None:
            number = next(
                (
                    one
                    for one in left
                    if one in outputs
                    and flowing[one] is not None
                    and self._turns.asks.parked.at(outputs[one]) is not None
                ),
                None,
            )
            if number is None:
                changed = any(a is not b for a, b in zip(flowing, gradients, strict=True))
                return tuple(flowing) if changed else None
            left.remove(number)
            flowing[number] = self._turns.serve(outputs[number], flowing[number])
        raise _AbandonedPass

    def release(self) -> None:
        """Take the hooks off the graph."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()


# ---- the run ------------------------------------------------------------------------------------


def _tracer(loss: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
    def run(tracer: Tracer, invocations: list[Invocation]) -> None:
        _run(invocations[0], functools.partial(_torch_backward, loss, *args, **kwargs))

    return Tracer(run, (), {}, has_input=True)


def _run(invocation: Invocation, backward: Callable[[], None]) -> None:
    switch: Any = thread_state.load()
    turns = Interleaver(VisitClock(), switch)
    worker = Worker(
        _REQUEST,
        within(managers_of_thread(), invocation.run),
        invocation.block.filename,
        switch.new_slot(torch.is_grad_enabled()),
        saves=invocation.saves,
    )
    step = _Pass(turns, worker, running_worker())
    _passes.add(worker, step)
    try:
        turns.add(worker)
        # In this thread, whatever the device: a worker can be given its turn from no other.
        with torch.autograd.set_multithreading_enabled(False):
            if turns.failed is None:
                backward()
    except _AbandonedPass:
        pass
    finally:
        turns.drop(_REQUEST)  # what is still parked waits for a gradient that never came
        _passes.remove(worker)
        step.release()
        worker.memo = None
    if worker.error is not None:
        errors = [worker.error]
        worker.error = None
        raise_again(errors.pop())
    invocation.warn(worker.warnings)
    invocation.take_bound()


def refuse_in_backward(worker: Worker, location: Location) -> None:
    """Raise `OutOfOrderError` where ``worker`` runs beside a backward pass.

    Call it before a value of a model is asked for: the forward is over by then.
    """
    if _passes.of(worker) is not None:
        why = "Beside a backward pass there are gradients only: the forward is over."
        raise out_of_order(worker, Visit(location, worker.step), "", why)


# ---- torch's names ------------------------------------------------------------------------------

_torch_backward = torch.Tensor.backward
_torch_grad: Any = torch._C.TensorBase.grad


@functools.wraps(_torch_backward)
def _backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(1)
    if not _is_entered(frame):
        return _torch_backward(self, *args, **kwargs)
    if not self.requires_grad:
        raise NotSupportedError(
            explain(
                "`backward` was called on a tensor that does not require grad.",
                where=Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name),
                why="Nothing that it was computed from requires a gradient, or it was computed "
                "under `torch.no_grad()` or in generation.",
                todo="Compute it with grad enabled, from a parameter or a tensor that requires it.",
            )
        )
    return _tracer(self, args, kwargs)


def install_backward() -> None:
    """Let `with loss.backward():` run its block beside the pass. Calling it again is free."""
    if torch.Tensor.backward is not _backward:
        torch.Tensor.backward = _backward


# Invariant: the code is kept, so that its id stays its own.
_sites: dict[tuple[int, int], tuple[CodeType, bool]] = {}
_MOST_SITES = 10_000


def _is_entered(frame: FrameType) -> bool:
    """Tell whether what ``frame`` calls now is entered by a `with` at once."""
    code, now = frame.f_code, frame.f_lasti
    known = _sites.get((id(code), now))
    if known is None:
        later = (one for one in dis.get_instructions(code) if one.offset > now)
        names = [one.opname for one, _ in zip(later, range(2), strict=False)]
        # Up to Python 3.13 one instruction enters, from 3.14 on it is looked up first.
        entered = names[:1] == ["BEFORE_WITH"] or names == ["COPY", "LOAD_SPECIAL"]
        if len(_sites) >= _MOST_SITES:
            _sites.clear()
        known = _sites[id(code), now] = (code, entered)
    return known[1]


@final
class _Passes:
    """The passes that run now; while there is one, `Tensor.grad` asks whose turn it is."""

    __slots__ = ("_lock", "_of")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[Worker, _Pass] = {}

    def add(self, worker: Worker, step: _Pass) -> None:
        with self._lock:
            self._of[worker] = step
            torch.Tensor.grad = _grad  # type: ignore[assignment]

    def remove(self, worker: Worker) -> None:
        with self._lock:
            del self._of[worker]
            if not self._of:
                del torch.Tensor.grad

    def of(self, worker: Worker | None) -> _Pass | None:
        """Return the pass that ``worker`` runs beside."""
        return None if worker is None else self._of.get(worker)


_passes = _Passes()


def _get_grad(self: torch.Tensor) -> Any:
    step = _passes.of(running_worker())
    return _torch_grad.__get__(self) if step is None else step.read(self)


def _set_grad(self: torch.Tensor, value: Any) -> None:
    step = _passes.of(running_worker())
    # None is no gradient: it takes the accumulated one away, as `zero_grad` does.
    if step is None or value is None:
        _torch_grad.__set__(self, value)
    else:
        step.write(self, value)


def _delete_grad(self: torch.Tensor) -> None:
    _torch_grad.__delete__(self)


_grad = property(_get_grad, _set_grad, _delete_grad)
