"""What every tier shares: marks by folder, model folders, and the leak checks."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.kept_engine import KeptEngine, put_in_order

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# For `benchmarks`. Last, so that the installed package stays the one that is tested.
sys.path.append(str(ROOT))
# The folders of a tier; the examples run on engines too.
TIER_OF = {"engine": "engine", "examples": "engine", "harness": "harness", "gpu": "gpu"}
# These start processes and threads once per module, so what is left is counted
# when the module is over. Everywhere else a test has to tidy up after itself.
PER_MODULE = ("engine", "harness", "gpu")
NEEDS_VLLM = ("engine", "examples")

# Started by Python or torch on first use and kept for the life of the process.
LASTING_PROCESSES = ("multiprocessing.resource_tracker",)
# So is this one; what it has forked for this process counts as this process's.
FORK_SERVER = "multiprocessing.forkserver"
GRACE_S = 3.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = _tier(item.path)
        if tier in PER_MODULE:
            item.add_marker(tier)
        if tier == "gpu" and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    put_in_order(items, lambda item: _module(item.path))


def _module(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else str(path)


def _tier(path: Path) -> str:
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return TIER_OF.get(folder, folder)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# ------------------------------------------------------------------ models


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The prepared SmolLM2 folder; made now if nobody has run `make model`."""
    chosen = os.environ.get("NNSIGHT_PP_TEST_MODEL")
    if chosen:
        return Path(chosen)
    script = ROOT / "scripts" / "prepare_smollm2.py"
    made = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_llama_path(smollm2_path: Path) -> Path:
    """A random 4-layer Llama folder, with the tokenizer of SmolLM2."""
    from fakes.models import kept_folder, make_tiny_llama

    return kept_folder("tiny-llama", smollm2_path, make_tiny_llama)


@pytest.fixture(scope="session")
def tiny_qwen2_path(smollm2_path: Path) -> Path:
    """A random 4-layer Qwen2 folder, with the tokenizer of SmolLM2."""
    from fakes.models import kept_folder, make_tiny_qwen2

    return kept_folder("tiny-qwen2", smollm2_path, make_tiny_qwen2)


@pytest.fixture(scope="session")
def kept_engine() -> Iterator[KeptEngine]:
    """Lends engines to modules, and keeps the last one for the next module."""
    from engine.backends import Engine

    before = _processes() | _threads()
    kept = KeptEngine(Engine, lambda: _processes() | _threads())
    yield kept
    kept.end()
    _fail_on_rest("the kept engine", lambda: (_processes() | _threads()) - before)


# ------------------------------------------------------------------- leaks


@pytest.fixture(autouse=True)
def nothing_left_by_test(request: pytest.FixtureRequest) -> Iterator[None]:
    if _tier(request.path) in PER_MODULE:
        yield
        return
    before = _processes() | _threads()
    yield
    _fail_on_rest("this test", lambda: (_processes() | _threads()) - before)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_module(request: pytest.FixtureRequest) -> Iterator[None]:
    kept: KeptEngine | None = None
    if _tier(request.path) == "engine":
        kept = request.getfixturevalue("kept_engine")
        kept.begin(_module(request.path))
    before = _processes() | _threads()
    workers_before = _started_greenlets()
    yield
    lasting = kept.parts if kept else set()
    _fail_on_rest("this module", lambda: (_processes() | _threads()) - before - lasting)
    if len(_started_greenlets()) > len(workers_before):
        gc.collect()  # a worker in a reference cycle ends when the cycle does
        left = [text for text in _started_greenlets() if text not in workers_before]
        assert not left, f"this module left unfinished workers: {left}"


def _fail_on_rest(who: str, left: Callable[[], set[str]]) -> None:
    """Give what is ending a moment, then fail with what is still there."""
    deadline = time.monotonic() + GRACE_S
    while (rest := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not rest, f"{who} left behind: {', '.join(sorted(rest))}"


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.daemon
    }


def _processes(of: str | int = "self") -> set[str]:
    """Name the live children of a process and of its fork server, by reading /proc."""
    found: set[str] = set()
    for task in Path(f"/proc/{of}/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread ended in between
            continue
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            command = b" ".join(words).decode(errors="replace").strip()
            if FORK_SERVER in command:
                found |= _processes(int(pid))
            # An empty command line is a child that has ended and was not waited for.
            elif command and not any(name in command for name in LASTING_PROCESSES):
                found.add(f"process {pid} ({command[:80]})")
    return found


def _started_greenlets() -> list[str]:
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return []
    return [
        repr(thing)
        for thing in gc.get_objects()
        # isinstance would ask proxies for their class, and some warn or compute then.
        # A main greenlet has no parent; it belongs to its thread, not to a test.
        if issubclass(type(thing), greenlet.greenlet) and thing and thing.parent is not None
        # Kept for another block, and empty: see `interleave.shell`.
        if not getattr(thing, "is_idle", False)
    ]


if importlib.util.find_spec("vllm") is None:
    collect_ignore = [*NEEDS_VLLM]
