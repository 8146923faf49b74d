"""The greenlets that workers run in. One that has run a block to its end runs another one later.

A greenlet that starts takes memory from the system for its frames, and gives it back when it ends:
20 microseconds, more than all else that a small block costs. So the ended ones are kept, parked in
the loop of `Shell.run`, where they hold nothing of the block that they ran.

A greenlet's C stack begins where it was first started. Below that address it and whoever resumes
it use the same memory, which every switch has to copy. So a kept one is taken only by a driver
that is no deeper than the one that started it. Only the main thread keeps any: they could not be
ended when another thread is over.
"""

from __future__ import annotations

import atexit
import functools
import threading
from typing import TYPE_CHECKING, Any, final

from greenlet import getcurrent, greenlet

from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    from nnsight_pp.interleave.worker import Worker

_MOST_KEPT = 256
# How much deeper than at its start a driver may be: a few frames of our own.
_SLACK_BYTES = 4096
# Invariant: all of them are suspended in the loop of `run`, and were started by this thread.
_kept: list[Shell] = []
_OWNER = threading.main_thread().ident


@final
class Shell(greenlet):
    """Runs one worker after another. It knows its worker, so `current_worker` is one type check.

    Attributes:
        worker: Whose block it runs; None once that has ended and it waits for another one.
        begin: The address at which its C stack begins, 0 where it is not to be kept.
    """

    # Known to csrc/near.hpp by their names.
    __slots__ = ("begin", "worker")
    worker: Worker | None
    begin: int

    def run(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the worker to its end; then wait for another one, if this one is to be kept."""
        _at_bottom()(self._loop)

    def _loop(self) -> None:
        address = _stack_address()
        if address is not None and threading.get_ident() == _OWNER:
            self.begin = address()
        while self.worker is not None:
            self.worker.run()
            self.worker = None
            if not self.begin:
                return
            parent = self.parent
            assert parent is not None
            # Whoever resumes it has given it a worker. When it is collected, GreenletExit is
            # raised here.
            parent.switch()

    @property
    def is_idle(self) -> bool:
        """Whether it only waits for a worker."""
        return self.worker is None


def shell_for(worker: Worker, context: Context) -> Shell:
    """Return a greenlet that runs ``worker`` with the context variables of ``context``."""
    shell = None
    if _kept and threading.get_ident() == _OWNER:
        address = _stack_address()
        if address is not None and _kept[-1].begin - address() < _SLACK_BYTES:
            shell = _kept.pop()
    if shell is None:
        shell = Shell()
        shell.begin = 0
    shell.worker = worker
    shell.gr_context = context
    return shell


def take_back(shell: Shell) -> None:
    """Keep ``shell``, whose worker has ended, for another one."""
    if not shell.begin or len(_kept) >= _MOST_KEPT or threading.get_ident() != _OWNER:
        return
    current = getcurrent()
    # Its parent is the one who resumed it last, and must not be a worker's.
    if type(current) is not Shell and not shell.dead:
        shell.gr_context = None
        shell.parent = current
        _kept.append(shell)


@functools.cache
def _at_bottom() -> Callable[[Callable[[], None]], None]:
    """Return what calls a function as the outermost frame of a greenlet."""
    if thread_state.load().name != "native":
        return _called
    at_bottom: Callable[[Callable[[], None]], None] = load_extension().at_bottom
    return at_bottom


def _called(call: Callable[[], None]) -> None:
    call()


@functools.cache
def _stack_address() -> Callable[[], int] | None:
    """Return what tells where the C stack is now, or None without the extension."""
    if thread_state.load().name != "native":
        return None
    address: Any = load_extension().stack_address
    return address


atexit.register(_kept.clear)
