"""Processes of engines, forked from one that has imported vLLM already.

Most of a start is the import of torch and vLLM, once in the engine's process and then once more in
its ranks. A server forks the engine's process after the import instead, and that one forks its
ranks, for the modules of `MODULES`: those whose question is what a model gives. The others start
engines as users do. Forked ranks share the seed of Python's hashes, so what depends on the order of
sets is asked there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import context as contexts
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor

from nnsight_pp.engines.vllm import machine

TESTS = Path(__file__).parents[1]
MODULES = (
    "engine/test_adapters.py",
    "engine/test_architectures.py",
    "engine/test_compiled.py",
    "engine/test_isolation.py",
    "engine/test_latent_attention.py",
    "engine/test_layer_rules.py",
    "engine/test_long_prompts.py",
    "engine/test_scheduling.py",
    "engine/test_sessions.py",
    "engine/test_standard_views.py",
    "engine/test_surface.py",
    "engine/test_tensor_adapters.py",
    "engine/test_tensor_and_stages.py",
    "engine/test_tensor_experts.py",
    "engine/test_three_stages.py",
    "engine/test_weights.py",
)


class EngineProcess(contexts.ForkServerProcess):
    """A process of an engine, or a rank of one in the tests' process.

    It has the environment and the outputs of whoever asks for it, not the server's.
    """

    def __getstate__(self) -> dict[str, Any]:
        outputs = {fd: reduction.DupFd(fd) for fd in (1, 2)}
        return {**self.__dict__, "_environment": dict(os.environ), "_outputs": outputs}

    def run(self) -> None:
        for fd, given in self._outputs.items():
            os.dup2(given.detach(), fd)
        os.environ.clear()
        os.environ.update(self._environment)
        _bind_threads()
        threading.Thread(target=_end_with_asker, daemon=True).start()
        super().run()


def _end_with_asker() -> None:
    """End this process with the one that has asked for it; its ranks follow."""
    asker = multiprocessing.parent_process()
    assert asker is not None
    asker.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _bind_threads() -> None:
    """Do what OpenMP does with these variables when it is loaded; that was in the server."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if places := os.environ.get("OMP_PLACES"):
        os.sched_setaffinity(0, {int(core) for core in re.findall(r"\d+", places)})


class EngineContext(contexts.ForkServerContext):
    """What vLLM takes `Process` and queues from in the tests' process."""

    Process = EngineProcess


class RankProcess(contexts.ForkProcess):
    """A rank, forked from the process of its engine."""

    def run(self) -> None:
        _bind_threads()
        super().run()


class RankContext(contexts.ForkContext):
    """The same, in the process of an engine."""

    Process = RankProcess


@contextlib.contextmanager
def warm_start() -> Iterator[None]:
    """Have the engines that this process starts forked from the server."""
    forkserver.set_forkserver_preload(["engine.warm_server"])
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    # The server starts with the first engine and reads its environment.
    with (
        mock.patch.object(vllm.v1.engine.utils, "get_mp_context", EngineContext),
        mock.patch.object(vllm.v1.executor.multiproc_executor, "get_mp_context", EngineContext),
        # It would have each process end itself that its asker has not spawned.
        mock.patch.object(machine, "hidden_main", contextlib.nullcontext),
        mock.patch.dict(os.environ, {"PYTHONPATH": paths}),
    ):
        yield
