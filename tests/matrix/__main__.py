"""Run the matrix and write its page: `make matrix`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matrix.cells import BAD
from matrix.chosen import COLUMNS, rows, start
from matrix.page import ROOT, facts_of_this_run, page
from matrix.runs import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument("--columns", default="local,1,2,3", help=", ".join(COLUMNS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one cell")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "matrix.md")
    given = parser.parse_args()
    columns = [COLUMNS[name] for name in given.columns.split(",")]
    if "NNSIGHT_PP_TEST_MODEL" not in os.environ:
        script = ROOT / "scripts" / "prepare_smollm2.py"
        made = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True)
        os.environ["NNSIGHT_PP_TEST_MODEL"] = made.stdout.strip().splitlines()[-1]
    facts = facts_of_this_run("make matrix", time.strftime("%Y-%m-%d"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(columns, start, rows, Path(folder), given.limit)
    facts["took"] = f"{(time.monotonic() - began) / 60:.0f} minutes"
    given.out.write_text(page(rows(), columns, found, facts))
    bad = sum(cell.kind in BAD for cell in found.values())
    print(f"{len(found)} cells, {bad} that should not be; written to {given.out}")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
