"""What every process of an engine runs first, in place of the user's main module.

multiprocessing runs the parent's main module again in each child that it spawns, and in their
children. `machine.hidden_main` names this module instead. In each of them it ends the process when
its parent is gone, so that a client that is killed leaves no engine behind.

Source: CPython 3.11 multiprocessing/spawn.py:_fixup_main_from_name runs it as ``__mp_main__``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

_LOOK_EVERY_S = 0.5
_GRACE_S = 2.0


def _end_with(parent: int) -> None:
    """End this process when ``parent``, or whoever has spawned it, is no longer its parent."""
    while os.getppid() == parent and _may_have_spawned(parent):
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
    # A rank that spins in C++ code runs no Python handler.
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _may_have_spawned(parent: int) -> bool:
    # Not known before multiprocessing has read this process's object. By then the parent may have
    # been gone for long, and another be its parent.
    spawner = multiprocessing.parent_process()
    return spawner is None or spawner.pid == parent


if __name__ == "__mp_main__":
    threading.Thread(
        target=_end_with, args=(os.getppid(),), daemon=True, name="nnsight_pp parent watch"
    ).start()
