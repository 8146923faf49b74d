"""Each suite of benchmarks runs through, quickly, and finds right values. No test looks at time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_equivalence import WORKLOADS, markdown, verdicts
from engine.warm_start import warm_start

ROOT = Path(__file__).parents[2]


def found_by(suite: str, out: Path) -> dict[str, Any]:
    """Return what a quick run of ``suite`` has found, with its pictures in ``out``."""
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--suite", suite]
    command += ["--json", str(out / "found.json"), "--out", str(out / "found.md")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((out / "found.json").read_text())["suites"][suite]


@pytest.mark.slow
def test_every_workload_is_equivalent_or_refused(smollm2_path: Path):
    words: dict[str, dict[str, str]] = {}
    with warm_start():
        cells = verdicts("tiny", ["rank", "local", "stages2"], list(WORKLOADS))
    assert all(cell["is_good"] for cell in cells)
    assert f"{len(cells)} of {len(cells)} cells are as they should be" in markdown(cells)
    for cell in cells:
        words.setdefault(cell["backend"], {})[cell["workload"]] = cell["word"]
    assert set(words) == {"rank", "local", "stages2"}
    for backend, word_of in words.items():
        gradients = "EQUIVALENT" if backend == "local" else "REFUSED"
        assert word_of.pop("gradient_patching") == gradients
        assert len(word_of) == 10
        assert set(word_of.values()) == {"EQUIVALENT"}


@pytest.mark.slow
def test_contenders_keep_the_same_numbers_as_hand_written_hooks(tmp_path: Path, smollm2_path: Path):
    cells = found_by("cost", tmp_path)["cells"]["cells"]
    done = {(one["who"], one["load"].partition(";")[0]) for one in cells}
    beside = ("hand-written hooks", "this library, local", "Hugging Face, raw hooks")
    for load in ("read one layer, last tokens", "read all layers, all tokens"):
        for who in ("this library, engine", *beside):
            assert (who, load) in done
    crossed = [
        cell["link_bytes"]
        for cell in cells
        if cell["who"] == "this library, engine" and "value of the first" in cell["load"]
    ]
    assert crossed
    assert min(crossed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["idle", "path", "local", "thread_state", "tensor"])
def test_suite_answers_its_questions(suite: str, tmp_path: Path, smollm2_path: Path):
    found = found_by(suite, tmp_path)["findings"]
    assert found
    assert all(one["samples"] for one in found)
    pictures = list(tmp_path.glob("*.png"))
    assert pictures
    assert all(path.stat().st_size > 10_000 for path in pictures)


def test_our_own_code_in_a_step_without_a_block_can_be_timed():
    code = "from benchmarks.bench_idle import own_calls; print(len(own_calls(2, 3).samples))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "3\n", done.stderr[-3000:]
