"""One library's side of `bench_local`: answers each row named on stdin with one sample.

    python -m benchmarks.local_child LIBRARY FOLDER

`LIBRARY` is `nnsight_pp`, `nnsight` or `hooks`. A line of input is the name of a row and how many
pairs to time; the answer is a number in microseconds, or a text that says why there is none.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.local_hooked import HookedRows
from benchmarks.local_traced import Row, TracedRows
from benchmarks.timing import difference_us


def sample(row: Row, pairs: int) -> float:
    """Return one figure of ``row``, in microseconds, taken at some depth of the stack.

    Python keeps its frames in pieces of 16 KB. Where a call crosses from one to the next, every
    such call takes memory from the system and gives it back (10 us). Where that happens is luck,
    so each sample tries another place.
    """
    return _deeper(random.randrange(100), row, pairs)


def _deeper(depth: int, row: Row, pairs: int) -> float:
    return _sample(row, pairs) if depth == 0 else _deeper(depth - 1, row, pairs)


def _sample(row: Row, pairs: int) -> float:
    if row.prepare is None:
        return difference_us(row.step, row.without, pairs) / row.count
    figures = []
    for _ in range(pairs):
        row.prepare()
        figures.append(difference_us(row.step, row.without, 1))
    return sorted(figures)[len(figures) // 2] / row.count


def serve(library: str, folder: Path) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    rows = HookedRows() if library == "hooks" else TracedRows(library, folder)
    known: dict[str, Row] = {}
    for line in sys.stdin:
        name, pairs = line.split()
        try:
            if name not in known:
                known[name] = getattr(rows, name)()
                for _ in range(0 if known[name].prepare else 3):
                    known[name].step()
            answer = {"us": sample(known[name], int(pairs))}
        except AttributeError as error:
            answer = {"missing": str(error)} if not hasattr(rows, name) else {"error": repr(error)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
