"""A worker may park inside a torch call on a real two-stage engine, or is refused: never a crash.

Source: the construction is the one that ends in a segmentation fault in ``c10::warn`` when torch's
thread-local state is not exchanged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "park_on_two_stages.py"
REFUSED = 3


@pytest.mark.parametrize(("swap", "code"), [("1", 0), ("0", REFUSED)], ids=["on", "off"])
def test_forty_steps_of_four_requests(swap: str, code: int, tiny_llama_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(SCRIPT), str(tiny_llama_path)],
        env={**os.environ, "NNSIGHT_PP_TLS_SWAP": swap},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    if code == REFUSED:
        assert "NNSIGHT_PP_TLS_SWAP" in done.stdout
        assert "park_on_two_stages.py" in done.stdout
