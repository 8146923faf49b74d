"""Processes with a gloo world, for tests: started once, given one function after the other.

Every wait has a bound. When a rank fails or hangs, the error shows the traceback of every rank: of
what it raised, or of where its threads stand.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_S = 60.0


class Ranks:
    """``count`` processes. Use it in a `with`; what `run` is given must be importable."""

    def __init__(self, count: int) -> None:
        self.count = count
        # What a failed function has left behind would disturb the next one.
        self.is_broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(rank, count, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(time.monotonic() + START_S)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass  # that rank has died
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        bound_s: float = 20.0,
        dying: tuple[int, ...] = (),
    ) -> list[Any]:
        """Call ``function(rank, count, *args)`` on every rank; return what each returned.

        Args:
            function: A function of an importable module.
            *args: Its further arguments.
            bound_s: The longest wait.
            dying: Ranks that are meant to die in it; they return None.
        """
        for pipe in self._pipes:
            pipe.send((function, args, bound_s))
        return self._answers(time.monotonic() + bound_s, dying)

    def _answers(self, deadline: float, dying: tuple[int, ...] = ()) -> list[Any]:
        answers, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                # A rank that hangs first writes where it stands.
                arrived = pipe.poll(max(0.0, deadline - time.monotonic()) + 1.0)
                is_good, answer = pipe.recv() if arrived else (False, self._stacks(rank))
            except EOFError:
                is_good, answer = rank in dying, None if rank in dying else "it died"
            answers.append(answer)
            if not is_good:
                failures.append(f"rank {rank}:\n{answer}")
        if failures:
            self.is_broken = True
            raise AssertionError("\n".join(failures))
        return answers

    def _stacks(self, rank: int) -> str:
        path = Path(self._folder.name) / f"stacks-{rank}"
        return f"no answer\n{path.read_text() if path.exists() else ''}"


def _main(rank: int, count: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=30),
    )
    pipe.send((True, None))
    with open(f"{folder}/stacks-{rank}", "w") as stacks:
        while (order := pipe.recv()) is not None:
            function, args, bound_s = order
            faulthandler.dump_traceback_later(bound_s, file=stacks)
            try:
                pipe.send((True, function(rank, count, *args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
            finally:
                faulthandler.cancel_dump_traceback_later()
    # gloo's own threads may be in a receive that nothing ends.
    os._exit(0)
