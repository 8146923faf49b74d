"""What a process says of its workers: on SIGUSR1, and to a stage that has waited in vain.

On SIGUSR1 it prints where its threads stand, and what its workers are parked on.

`kill -USR1 <pid of a rank>` is for a rank that seems to be stuck. The stacks of the threads are
written by C code, so they come even when no Python code runs; those of the workers come when the
main thread runs Python code again.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from nnsight_pp.core.standing import Standing
from nnsight_pp.interleave.clock import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.worker import Worker


def report_of(workers: Iterable[Worker], where: str) -> str:
    """Return each worker with its ask, its step and its stack.

    Args:
        workers: The workers of this process.
        where: Where this process stands, in words.
    """
    lines = [f"nnsight_pp workers on {where}:"]
    for worker in workers:
        lines.append(f"{worker!r} | step {worker.step} | {worker.asked} asks so far")
        frame = worker.greenlet.gr_frame
        if frame is not None:
            lines += [line.rstrip("\n") for line in traceback.format_stack(frame)]
    if len(lines) == 1:
        lines.append("none")
    return "\n".join(lines) + "\n"


def standing_of(turns: Interleaver, request: str) -> Standing:
    """Return how far an engine's rank is with ``request``. On any thread: it only looks."""
    workers, clock = turns.workers(request), turns.clock
    assert isinstance(clock, StepClock)
    doing = ", ".join(map(_doing, workers)) or "no block of it runs here"
    asked = sum(worker.asked for worker in workers)
    return Standing(clock.opened(request), clock.closed(request), asked, doing)


def _doing(worker: Worker) -> str:
    ask, error = worker.ask, worker.error
    if error is not None:
        return f"failed with {type(error).__name__}"
    if worker.has_ended:
        return "its block has ended"
    return "its block runs" if ask is None else f"parked on {ask}"


def print_on_signal(workers: Callable[[], Iterable[Worker]], where: str) -> bool:
    """Print all stacks to stderr on SIGUSR1; return whether it is set up.

    It is not where the signal has a handler already (the user's own, in an engine that runs in his
    process), and outside of the main thread, which alone may set one.
    """
    taken = signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    stderr = sys.__stderr__
    if taken or stderr is None or threading.current_thread() is not threading.main_thread():
        return False

    def handle(_: int, __: FrameType | None) -> None:
        sys.stderr.write(report_of(workers(), where))
        sys.stderr.flush()

    signal.signal(signal.SIGUSR1, handle)
    # `chain`: the handler above comes after it.
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True, chain=True)
    return True
