"""How an engine starts and ends: from a script, `python -c` and a notebook, and what is refused.

Each start is a process of its own, with a tiny model on two stages, so this module starts four
engines one after the other. What it watches is processes: see `Watched`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_pp import VLLM, ConfigurationError, MachineError

SCRIPTS = Path(__file__).parent / "scripts"
START_BOUND_S = 150
# What ends by itself after its parent may take this long.
ENDING_BOUND_S = 10
QUICK = {
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "40",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}

COMMAND = """
import sys
import torch
from nnsight_pp import VLLM, ParkRefusedError
model = VLLM(
    sys.argv[1], pipeline_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=64
)
with model.trace("one two three", temperature=0.0, max_tokens=1):
    late = model.model.layers[3].mlp.output.save()
print(list(late.shape))
try:
    with model.trace("one two three", temperature=0.0, max_tokens=2):
        early = model.model.layers[0].mlp.output
        ones = torch.ones_like(model.model.layers[3].mlp.output).save()
except ParkRefusedError as error:
    print(error)
"""


class Watched:
    """A program, and every process that was ever seen below it.

    Ranks may outlive their parent and move below another one, and a kernel is in a session of its
    own: only watching while the program runs finds all of them. A process is its id and its start
    time, since ids come back.
    """

    def __init__(self, command: list[str], folder: Path, **environment: str):
        self._out = (folder / "stdout").open("w+")
        self._err = (folder / "stderr").open("w+")
        self.seen: set[tuple[int, str]] = set()
        self.process = subprocess.Popen(
            command,
            stdout=self._out,
            stderr=self._err,
            cwd=folder,
            env={**os.environ, **QUICK, **environment},
            start_new_session=True,
        )

    def finish(self) -> str:
        """Wait for the program's end; return what it printed."""
        deadline = time.monotonic() + START_BOUND_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look(self.process.pid)
            time.sleep(0.2)
        out, err = self._text(self._out), self._text(self._err)
        assert self.process.poll() is not None, f"not done in {START_BOUND_S} s:\n{out}\n{err}"
        assert self.process.returncode == 0, f"{out}\n{err}"
        return out

    def said(self) -> str:
        """Return what it printed on stderr."""
        return self._text(self._err)

    def alive(self) -> list[str]:
        return [f"{pid} {command_of(pid)}" for pid, start in self.seen if start_of(pid) == start]

    def left(self) -> list[str]:
        """Return what still lives when the program's processes had their time to end."""
        deadline = time.monotonic() + ENDING_BOUND_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.alive()

    def reap(self) -> None:
        self._look(self.process.pid)
        for pid, start in self.seen:
            if start_of(pid) == start:
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    def _look(self, pid: int) -> None:
        for child in children_of(pid):
            if (start := start_of(child)) is not None:
                self.seen.add((child, start))
                self._look(child)

    @staticmethod
    def _text(file: Any) -> str:
        file.seek(0)
        return file.read()


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has ended in between
            continue
    return found


def start_of(pid: int) -> str | None:
    """Return the start time of a process that lives, None for one that has ended."""
    try:
        # The name, in brackets, may hold anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    started = []

    def start(*arguments: str, **environment: str) -> Watched:
        started.append(Watched([sys.executable, *arguments], tmp_path, **environment))
        return started[-1]

    yield start
    for program in started:
        program.reap()


# ------------------------------------------------------------------- ways to start and to end


@pytest.fixture(scope="module")
def script_said(
    tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    program = Watched(
        [sys.executable, str(SCRIPTS / "plain_script.py"), str(tiny_llama_path)],
        tmp_path_factory.mktemp("script"),
    )
    try:
        yield {**json.loads(program.finish()), "left": program.left(), "seen": len(program.seen)}
    finally:
        program.reap()


def test_script_without_main_guard_traces_on_two_stages(script_said: dict[str, Any]):
    assert script_said["late"] == [3, 128]
    assert script_said["logits"] == 2
    assert isinstance(script_said["text"], str)
    assert script_said["left on ranks"] == [0, 0]


def test_close_ends_the_engines_processes(script_said: dict[str, Any]):
    assert script_said["processes before"] == 0
    assert script_said["processes"] >= 2
    assert script_said["processes after close"] == 0


def test_nothing_is_left_after_the_script(script_said: dict[str, Any]):
    assert script_said["seen"] >= 2
    assert script_said["left"] == []


def test_leaving_without_close_ends_the_engine_of_a_python_c(
    run: Callable[..., Watched], tiny_llama_path: Path
):
    """With the exchange of torch's thread state off, its second block is refused."""
    program = run("-c", COMMAND, str(tiny_llama_path), NNSIGHT_PP_TLS_SWAP="0")
    shape, refused = program.finish().split("\n", 1)
    assert shape == "[3, 128]"
    assert "NNSIGHT_PP_TLS_SWAP=0" in refused
    line = COMMAND[: COMMAND.index("ones =")].count("\n") + 1
    assert f"<string>:{line}    <- here" in refused
    assert len(program.seen) >= 2
    assert program.left() == []


def test_a_stage_that_cannot_be_set_up_ends_the_start(
    run: Callable[..., Watched], tiny_llama_path: Path
):
    """The other stage waits for it in a collective."""
    program = run(str(SCRIPTS / "broken_rank.py"), str(tiny_llama_path))
    assert "The engine did not start" in program.finish()
    assert "no forward on this stage" in program.said()
    assert program.left() == []


def test_notebook_uses_saves_in_a_later_cell_and_leaves_nothing(
    run: Callable[..., Watched], tiny_llama_path: Path
):
    program = run(str(SCRIPTS / "run_notebook.py"), str(tiny_llama_path))
    assert program.finish().strip() == "[3, 128] [3, 128] 2"
    assert len(program.seen) >= 3
    assert program.left() == []


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("an unknown option", "TypeError", "'heat'"),
        ("an empty prompt", "ValueError", "empty"),
        ("a list of prompts", "ValueError", "tracer.invoke(prompt)"),
        ("two prompts", "ValueError", "2 inputs"),
    ],
)
def test_trace_refuses_and_the_engine_serves_on(
    script_said: dict[str, Any], what: str, kind: str, words: str
):
    refusal = script_said["refused"][what]
    assert kind in refusal["kinds"]
    assert words in refusal["text"]


def test_too_little_memory_is_said_before_a_process_starts(tiny_llama_path: Path):
    before = children_of(os.getpid())
    with pytest.raises(MachineError, match=r"2 ranks need about .* GiB of memory, and .* GiB are"):
        VLLM(str(tiny_llama_path), pipeline_parallel_size=2, kv_cache_memory_bytes=1 << 50)
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size is not supported"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is not supported"),
        ({"async_scheduling": True}, "async_scheduling=True cannot be used"),
    ],
)
def test_setting_that_cannot_work_is_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        VLLM("no-such-model", **arguments)


def test_more_stages_than_cores_are_taken(tiny_llama_path: Path):
    from nnsight_pp.engines.vllm.machine import core_binding

    num_stages = len(os.sched_getaffinity(0)) + 1
    model = VLLM(str(tiny_llama_path), pipeline_parallel_size=min(num_stages, 4), max_model_len=64)
    assert not model.dispatched
    assert len(model.model.layers) == 4
    assert core_binding(3, [0, 1]).split("|") == ["0", "1", "0"]
