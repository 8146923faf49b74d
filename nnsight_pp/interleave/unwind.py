"""The end of a worker whose visit never came.

A worker in a loop that outran the run is cut: its `finally` blocks run, the statements after the
loop do not, and the user is warned. Any other worker gets `OutOfOrderError` at the line where it
is parked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnsight_pp.core.ask import Join, Pull, Read, Step, Turn, Write
from nnsight_pp.core.location import Visit
from nnsight_pp.errors import BarrierError, OutOfOrderError, ParkRefusedError, explain
from nnsight_pp.interleave.worker import LoopCut

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.interleave.clock import Clock
    from nnsight_pp.interleave.worker import Worker

# A block that catches what it is thrown may park again, at most this often.
MOST_THROWS = 100


def out_of_order(worker: Worker, visit: Visit, ran: str, why: str = "") -> OutOfOrderError:
    """Return the error for a value that the model has passed, or never computes."""
    return OutOfOrderError(
        explain(
            f"{visit} was asked for, but the model already ran past it or never computes it.",
            where=worker.where() or worker.error_at,
            why=why or "A block must ask for values in the order in which the model computes them.",
            todo="Move this line up, or read the value in its own `tracer.invoke(...)`.",
            ran=f"request {worker.request} | {ran}" if ran else "",
        )
    )


def loop_warning(worker: Worker, what: str) -> LoopCut:
    """Note that ``worker``'s loop outran the run, and return what cuts it."""
    where = worker.where()
    line = f" at {where.filename}:{where.line}" if where else ""
    text = (
        f"A loop asked for {what}{line}, which was never reached: the run ended earlier. "
        "What was saved until then is kept; the statements after the loop did not run."
    )
    worker.warnings = (*worker.warnings, text)
    return LoopCut(what)


def never_filled(worker: Worker, barrier: object, ran: str) -> BarrierError:
    """Return the error for a block that waits at a barrier for others that never come."""
    return BarrierError(
        explain(
            f"{barrier} was never reached by every block that it waits for.",
            where=worker.where(),
            why="A barrier opens when as many blocks as it was made for have called it.",
            todo="Make it for the number of blocks that call it: `tracer.barrier(n)`.",
            ran=f"request {worker.request} | {ran}" if ran else "",
        )
    )


def park_refused(worker: Worker, what: str, ran: str) -> ParkRefusedError:
    """Return the error for a park where the worker's stack must not be left."""
    if worker.is_calling:
        why = "A module that is called from a block runs to its end: it is handed values, and what "
        why += "they hold was not found in time."
        todo = "Hand the module tensors, or lists, tuples and dicts of tensors."
    else:
        why = "The worker would have to park inside torch, and the exchange of torch's "
        why += "thread-local state is off (NNSIGHT_PP_TLS_SWAP=0) or not complete on this torch."
        todo = "Unset NNSIGHT_PP_TLS_SWAP, or use the value one step later."
    return ParkRefusedError(
        explain(
            f"{what} is not here yet and was used inside a torch call.",
            where=worker.where(),
            why=why,
            todo=todo,
            ran=ran,
        )
    )


def unwind(
    worker: Worker,
    throw: Callable[[Worker, BaseException], None],
    ran: str,
    clock: Clock,
    why: Exception | None = None,
) -> None:
    """End ``worker``, however often its block catches what it is thrown: ``why``, if it is told."""
    for _ in range(MOST_THROWS):
        ask = worker.ask
        if worker.has_ended or ask is None:
            return
        if why is not None:
            throw(worker, why)
        elif isinstance(ask, Step):
            throw(worker, loop_warning(worker, f"step {ask.step}"))
        elif isinstance(ask, Pull):
            throw(worker, out_of_order(worker, Visit(ask.location, ask.step), ran))
        elif isinstance(ask, Join):
            throw(worker, never_filled(worker, ask.barrier, ran))
        elif isinstance(ask, (Read, Write, Turn)):
            visit = Visit(ask.location, ask.visit)
            if clock.is_sought(worker, visit):  # the loop's step was there, this in it not
                worker.is_relaxed = False
                throw(worker, out_of_order(worker, Visit(ask.location, worker.step), ran))
            elif worker.loop_depth and ask.visit > 0:
                throw(worker, loop_warning(worker, str(visit)))
            else:
                throw(worker, out_of_order(worker, visit, ran))
