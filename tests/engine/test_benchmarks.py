"""A slice of the benchmarks runs through and finds right values. It never looks at time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path, name, *options):
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", f"benchmarks.bench_{name}", "--json", str(out), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow
def test_every_workload_is_equivalent_on_two_stages_or_refused(tmp_path, smollm2_path):
    found = run(tmp_path, "equivalence", "--models", "tiny", "--backends", "stages2")
    words = {cell["workload"]: cell["word"] for cell in found["cells"]}
    assert len(words) == 11
    assert words.pop("gradient_patching") == "REFUSED"
    assert set(words.values()) == {"EQUIVALENT"}


@pytest.mark.slow
def test_contenders_keep_the_same_numbers_as_hand_written_hooks(tmp_path, smollm2_path):
    options = ("--shapes", "2x1", "--in-flight", "2", "--prompts", "8", "--parts", "loads")
    found = run(tmp_path, "cost", "--quick", *options)
    done = {(cell["who"], cell["load"].partition(";")[0]) for cell in found["cells"]["cells"]}
    for load in ("read one layer, last tokens", "read all layers, all tokens"):
        assert {("this library, engine", load), ("hand-written hooks", load)} <= done
    cells = found["cells"]["cells"]
    (crossed,) = (
        cell["link_bytes"]
        for cell in cells
        if cell["who"] == "this library, engine" and "value of the first" in cell["load"]
    )
    assert crossed > 0


def test_our_own_code_in_a_step_without_a_block_can_be_timed():
    code = "from benchmarks.bench_idle import own_calls; print(len(own_calls(2, 3).samples))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "3\n", done.stderr[-3000:]
