"""A process of an engine ends with the process that has spawned it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

_SPAWN = """
import multiprocessing, os, signal, time
from nnsight_pp.engines.vllm.machine import hidden_main

if __name__ == "__main__":
    with hidden_main():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_ends_when_its_parent_is_killed_before_it_has_begun(tmp_path: Path):
    script = tmp_path / "spawn.py"
    script.write_text(_SPAWN)
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _is_running(child)
    limit = time.monotonic() + 30
    while _is_running(child) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not _is_running(child)
