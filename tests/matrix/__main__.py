"""Run the matrix and write its page: `make matrix`.

In pieces, for machines on which a run would be too long: `--kept FILE` keeps the cells and runs
only the rows that it has none of, `NNSIGHT_PP_MATRIX_ROWS` says which of them. The page shows the
rows that have been run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.sharded import WIDE
from fakes.models import make_tiny_qwen2
from matrix.cells import BAD, Cell, Kind
from matrix.chosen import COLUMNS, ROWS, rows, start
from matrix.page import ROOT, facts_of_this_run, page
from matrix.runs import run_all

COLUMNS_BY_DEFAULT = "local,1,2,3"
_MODELS = {
    "smollm2": "SmolLM2-135M-Instruct, fp32",
    "qwen2": "a random Qwen2 of SmolLM2's size with 18 heads, fp32",
}


def main() -> int:
    about = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser(prog="matrix", description=about)
    parser.add_argument("--columns", default=COLUMNS_BY_DEFAULT, help=", ".join(COLUMNS))
    parser.add_argument("--model", default="smollm2", choices=_MODELS, help="what runs the blocks")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one cell")
    parser.add_argument("--alone", action="store_true", help="run nothing beside the blocks")
    parser.add_argument("--kept", type=Path, help="the cells of earlier pieces, and of this one")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "matrix.md")
    given = parser.parse_args()
    columns = [COLUMNS[name] for name in given.columns.split(",")]
    if "NNSIGHT_PP_TEST_MODEL" not in os.environ:
        script = ROOT / "scripts" / "prepare_smollm2.py"
        made = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True)
        os.environ["NNSIGHT_PP_TEST_MODEL"] = made.stdout.strip().splitlines()[-1]
    facts = facts_of_this_run(_command(given), time.strftime("%Y-%m-%d"), _MODELS[given.model])
    seconds, found = _kept(given.kept)
    # The processes of the run choose theirs by it, too.
    wanted = [row.name for row in rows() if not any(name == row.name for name, _, _ in found)]
    os.environ["NNSIGHT_PP_MATRIX_ROWS"] = " ".join(wanted)
    began = time.monotonic()
    if wanted:
        with tempfile.TemporaryDirectory() as folder:
            if given.model == "qwen2":
                smollm2 = Path(os.environ["NNSIGHT_PP_TEST_MODEL"])
                made = make_tiny_qwen2(Path(folder) / "model", smollm2, **WIDE)
                os.environ["NNSIGHT_PP_TEST_MODEL"] = str(made)
            found |= run_all(columns, start, rows, Path(folder), given.limit, is_alone=given.alone)
    seconds += time.monotonic() - began
    if given.kept is not None:
        cells = [[*place, cell.kind, cell.why] for place, cell in found.items()]
        given.kept.write_text(json.dumps([seconds, cells]))
    facts["took"] = f"{seconds / 60:.0f} minutes" + (", in pieces" if given.kept else "")
    shown = [row for row in ROWS if any(name == row.name for name, _, _ in found)]
    given.out.write_text(page(shown, columns, found, facts))
    bad = sum(cell.kind in BAD for cell in found.values())
    print(f"{len(found)} cells, {bad} that should not be; written to {given.out}")
    return bad > 0


def _command(given: argparse.Namespace) -> str:
    said = f"--columns {given.columns}" if given.columns != COLUMNS_BY_DEFAULT else ""
    said += f" --model {given.model}" if given.model != "smollm2" else ""
    said += " --alone" if given.alone else ""
    return f'make matrix MATRIX_ARGS="{said.strip()}"' if said else "make matrix"


def _kept(file: Path | None) -> tuple[float, dict[tuple[str, str, bool], Cell]]:
    """Return how long the earlier pieces took, and their cells."""
    if file is None or not file.exists():
        return 0.0, {}
    seconds, cells = json.loads(file.read_text())
    return seconds, {(row, column, side): Cell(Kind(k), why) for row, column, side, k, why in cells}


if __name__ == "__main__":
    sys.exit(main())
