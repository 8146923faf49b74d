"""Scripts that end the interpreter if thread state is not exchanged, judged from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=HERE.parents[1],
    )


@pytest.mark.parametrize("script", sorted(HERE.glob("park_*.py")), ids=lambda path: path.stem)
def test_worker_parked_inside_torch_leaves_the_model_whole(script: Path) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


@pytest.mark.parametrize("script", sorted(HERE.glob("fail_*.py")), ids=lambda path: path.stem)
def test_the_same_without_the_exchange_dies(script: Path) -> None:
    """What is avoided is real here; if this stops failing, the exchange has lost its reason."""
    done = run(script)
    # Killed by SIGSEGV or SIGABRT.
    assert done.returncode in (-11, -6), (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("script", sorted(HERE.glob("raise_*.py")), ids=lambda path: path.stem)
def test_an_error_of_torch_in_a_block_is_an_exception(script: Path) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok"
    # If this stops failing, the outermost frame of a worker has lost its reason.
    assert run(script, "unprotected").returncode in (-11, -6)
