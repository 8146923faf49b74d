"""Whether every workload gives the same on every backend as on one rank.

    python -m benchmarks.bench_equivalence [--quick] [--models tiny,smollm2]
        [--backends local,stages2] [--workloads steering,probe] [--json FILE]

The reference is an engine of one rank; for what needs gradients it is a computation by hand on the
bare Hugging Face module. `benchmarks/equivalence.py` says what EQUIVALENT asks for. Ends with 1
where a cell is not what it should be.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.backends import BACKENDS, CLEAN, MODELS, OTHER, REFERENCE, THIRD, opened
from benchmarks.equivalence import Result, Verdict, compare, effect_of_edit, effect_of_prompt
from benchmarks.findings import write_json
from benchmarks.timing import environment, table
from benchmarks.workloads import WORKLOADS, Task, Workload, task_for, untouched
from nnsight_pp import NotSupportedError

# SmolLM2 has nine heads, which two ranks cannot share.
SETS = {
    "tiny": ("rank", "local", "stages2", "stages3", "tp2"),
    "smollm2": ("rank", "local", "stages2", "stages3", "tp3"),
}
QUICK = {"tiny": ("rank", "local", "stages2")}
GOOD = ("EQUIVALENT", "REFUSED")
Cell = Result | Verdict


def results_on(model: Any, names: list[str], task: Task) -> dict[str, Cell]:
    """Return what each workload gives on ``model``, a verdict where it gives nothing."""
    found: dict[str, Cell] = {"untouched": untouched(model, task)}
    for name in names:
        start = time.monotonic()
        try:
            found[name] = WORKLOADS[name].run(model, task)
        except NotSupportedError as refused:
            found[name] = Verdict("REFUSED", why=_first_line(refused))
        except Exception as error:
            found[name] = Verdict("FAILED", why=f"{type(error).__name__}: {_first_line(error)}")
        print(f"    {name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return found


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def gradients_by_hand(folder: Path, task: Task) -> Result:
    """Return what `gradient_patching` should give, with plain hooks on the plain module."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def streams_of(prompt: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        seen: list[torch.Tensor] = []

        def keep(layer: Any, args: Any, out: Any) -> None:
            seen.append(out if isinstance(out, torch.Tensor) else out[0])

        handles = [module.model.layers[at].register_forward_hook(keep) for at in task.layers]
        logits = module(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        for handle in handles:
            handle.remove()
        return seen, logits

    got: dict[Any, torch.Tensor] = {}
    donors, _ = streams_of(task.other)
    for number, prompt in enumerate(task.prompts):
        streams, logits = streams_of(prompt)
        slopes = torch.autograd.grad(logits[11] - logits[12], streams)
        got["logits", number, 0] = logits.detach()
        for at, there, here, slope in zip(task.layers, donors, streams, slopes, strict=True):
            got["estimate", number, at] = ((there - here) * slope).sum(-1)[0].detach()
    return got


def verdict_of(workload: Workload, cells: dict[str, Cell], name: str, reference: Cell) -> Verdict:
    """Return the verdict of one workload on one backend."""
    got, plain = cells[name], cells["untouched"]
    if isinstance(got, Verdict):
        return got
    if isinstance(reference, Verdict):
        return Verdict("FAILED", why="there is no reference to compare with")
    assert not isinstance(plain, Verdict)
    effect = effect_of_edit(got, plain) if workload.edits else effect_of_prompt(got)
    return compare(got, reference, effect)


def verdicts(kind: str, backends: list[str], names: list[str]) -> list[dict[str, Any]]:
    """Run everything on one model; return a row for each cell."""
    folder = MODELS[kind]()
    results: dict[str, dict[str, Cell]] = {}
    by_hand: Result = {}
    for backend in dict.fromkeys([REFERENCE, *backends]):
        print(f"  {kind} on {BACKENDS[backend].title} ...", file=sys.stderr, flush=True)
        with opened(BACKENDS[backend], folder, seed=0) as model:
            task = task_for(model, (CLEAN, THIRD), OTHER, strength=1.0 if kind == "tiny" else 6.0)
            results[backend] = results_on(model, names, task)
            if backend == "local" and "gradient_patching" in names:
                by_hand = gradients_by_hand(folder, task)
        gc.collect()
    rows = []
    for name in names:
        workload = WORKLOADS[name]
        for backend in backends:
            reference = by_hand if workload.is_local else results[REFERENCE][name]
            one = verdict_of(workload, results[backend], name, reference)
            is_good = one.word == ("REFUSED" if _must_refuse(workload, backend) else "EQUIVALENT")
            row = {"model": kind, "workload": name, "title": workload.title}
            rows.append({**row, "backend": backend, "is_good": is_good, **one._asdict()})
    return rows


def _must_refuse(workload: Workload, backend: str) -> bool:
    return workload.is_local and bool(BACKENDS[backend].stages)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table for each model, the figures of all cells, and what went wrong."""
    parts = []
    for kind in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == kind]
        backends = list(dict.fromkeys(row["backend"] for row in own))
        lines = []
        for title in dict.fromkeys(row["title"] for row in own):
            cells = {row["backend"]: row for row in own if row["title"] == title}
            lines.append([title, *(_shown(cells[backend]) for backend in backends)])
        head = [f"{kind}: largest total variation, effect"]
        parts.append(table(head + [BACKENDS[one].title for one in backends], lines))
    good = sum(row["is_good"] for row in rows)
    parts.append(f"{good} of {len(rows)} cells are as they should be.")
    parts += [
        f"* {row['model']}, {row['title']}, {BACKENDS[row['backend']].title}: {row['word']}, "
        f"{row['why']}"
        for row in rows
        if not row["is_good"]
    ]
    return "\n\n".join([*parts, environment()])


def _shown(row: dict[str, Any]) -> str:
    if row["word"] in ("REFUSED", "FAILED"):
        return row["word"]
    return f"{row['word']} {row['variation']:.1e}, {row['effect']:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model, fewer backends")
    parser.add_argument("--models", help=f"of {', '.join(SETS)}")
    parser.add_argument("--backends", help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--json", type=Path, help="write all cells to this file")
    given = parser.parse_args()
    sets = QUICK if given.quick else SETS
    names = given.workloads.split(",")
    rows = []
    for kind in given.models.split(",") if given.models else sets:
        chosen = given.backends.split(",") if given.backends else sets.get(kind, SETS[kind])
        rows += verdicts(kind, list(chosen), names)
    text = markdown(rows)
    print(text)
    if given.json is not None:
        write_json(given.json, [], text, rows)
    return 0 if all(row["is_good"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
