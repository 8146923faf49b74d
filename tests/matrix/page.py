"""The matrix as a page of the documentation."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matrix.cells import BAD, Cell, Column, Kind, Row

ROOT = Path(__file__).resolve().parents[2]
Found = Mapping[tuple[str, str, bool], Cell]


def facts_of_this_run(command: str, date: str, model: str) -> dict[str, str]:
    """Return what the page says of where and when it was made."""
    import torch
    import transformers
    import vllm

    versions = [f"Python {platform.python_version()}"]
    versions += [f"{one.__name__} {one.__version__}" for one in (vllm, torch, transformers)]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return {
        "command": f"`{command}`",
        "date": date,
        "commit": commit or "unknown",
        "versions": ", ".join(versions),
        "machine": f"{models[0] if models else platform.machine()}, {cores} cores, "
        f"{memory:.0f} GiB, no GPU",
        "model": model,
    }


def page(
    rows: Sequence[Row], columns: Sequence[Column], found: Found, facts: Mapping[str, str]
) -> str:
    """Return the text of the page."""
    heads = [
        (one, beside)
        for one in columns
        for beside in (False, True)
        if (rows[0].name, one.name, beside) in found
    ]
    parts = [_INTRODUCTION, _table(["", ""], [[name, said] for name, said in facts.items()])]
    parts.append("## Totals")
    kinds = [kind for kind in Kind if kind is not Kind.ABSENT]
    totals = []
    for column, beside in heads:
        counts = Counter(found[row.name, column.name, beside].kind for row in rows)
        totals.append([_head(column, beside), *(str(counts[kind]) for kind in kinds)])
    parts.append(_table(["", *map(str, kinds)], totals))
    bad = [
        f"* `{name}`, {column}{', beside 7' if beside else ''}: **{cell.kind}**, {_plain(cell.why)}"
        for (name, column, beside), cell in found.items()
        if cell.kind in BAD
    ]
    if bad:
        parts += ["## What should not be", "\n".join(bad)]
    for title, chosen in (
        ("## Blocks that run", [row for row in rows if row.refused is None]),
        ("## Blocks that are refused", [row for row in rows if row.refused is not None]),
    ):
        lines = [
            [f"`{row.name}`", *(str(found[row.name, one.name, side].kind) for one, side in heads)]
            for row in chosen
        ]
        if chosen:
            parts += [title, _table(["block", *(_head(one, side) for one, side in heads)], lines)]
    said = [[f"`{row.name}`", _words(row, found)] for row in rows if row.refused is not None]
    if said:
        parts += ["## What the refused ones say", _table(["block", "first line"], said)]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# The matrix

Which block gives what on which backend. This page is written by a run; nobody edits it.

* **Supported**: the values are those of the first column, up to the tolerance of
  [compare.py](../tests/engine/compare.py). The first column is the Hugging Face model in one
  process, and is what the others are compared with. Nothing is left behind on the ranks.
* **Refused**: the documented error, at the marked line of the block.
* **Error**: another error, or something was left behind. **Hang**: no answer in time.
  **Silently wrong**: other values, a block that ran where it must be refused, or a neighbour that
  got other tokens or values than it gets alone.
* **-**: the block cannot be written there.

"Beside 7" means that seven other requests of mixed kinds run in the same steps
([neighbours.py](../tests/engine/neighbours.py)). The blocks are those of
[blocks.py](../tests/engine/blocks.py), [blocks_of_values.py](../tests/engine/blocks_of_values.py),
[blocks_of_control.py](../tests/engine/blocks_of_control.py) and
[refused_blocks.py](../tests/engine/refused_blocks.py)."""


def _head(column: Column, beside: bool) -> str:
    return f"{column.name}, beside 7" if beside else column.name


def _words(row: Row, found: Found) -> str:
    """Return what the row says; the same row may say more than one thing."""
    said = [cell.why for (name, _, _), cell in found.items()
            if name == row.name and cell.kind is Kind.REFUSED]  # fmt: skip
    return _plain(said[-1]) if said else ""


def _plain(text: str) -> str:
    return text.replace("|", "/").replace(str(ROOT), "").replace("\n", " ")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])
