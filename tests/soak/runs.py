"""Runs many requests of drawn kinds on an engine, and looks at its processes meanwhile."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends import GAUGES
from engine.compare import assert_same
from soak.kinds import KINDS, NUM_REQUESTS

# Of the mean of the third quarter: how far the mean of the last may lie above it.
MOST_GROWTH = 0.05


@dataclass
class Look:
    """What one process uses."""

    num_requests: int
    rss_mb: float
    num_fds: int
    num_threads: int


@dataclass
class Soak:
    """A run of many requests.

    Attributes:
        model: The engine that is soaked.
        wanted: What each kind gives, known from another engine.
        seed: Of the order.
        looks: By process name, from the first request to the last.
        counts: How often each kind ran.
    """

    model: Any
    wanted: dict[str, Any]
    seed: int = 1
    looks: dict[str, list[Look]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, num_requests: int, *, look_every: int = 0) -> None:
        """Run ``num_requests`` or a few more; fail at the first value that is not as wanted."""
        drawn, done, next_look = random.Random(self.seed), 0, 0
        while done < num_requests:
            if look_every and done >= next_look:
                self.look(done)
                next_look += look_every
            name = drawn.choice(list(KINDS))
            assert_same(KINDS[name](self.model), self.wanted[name], name)
            self.counts[name] += 1
            done += NUM_REQUESTS[name]
        if look_every:
            self.look(done)
        self.assert_idle()

    def assert_idle(self) -> None:
        """Fail where a rank has kept anything."""
        for rank in self.model.statistics():
            assert {name: rank[name] for name in GAUGES if rank.get(name)} == {}

    def look(self, num_requests: int) -> None:
        """Note what this process and the engine's use."""
        gc.collect()
        for name, pid in processes().items():
            facts = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in facts if ":\t" in line)
            look = Look(
                num_requests,
                int(status["VmRSS"].split()[0]) / 1024,
                len(list(Path(f"/proc/{pid}/fd").iterdir())),
                int(status["Threads"]),
            )
            self.looks.setdefault(name, []).append(look)

    def growths(self) -> dict[str, tuple[float, int, int]]:
        """Return by process how much it has grown from the third quarter to the last.

        Returns:
            The share by which the resident memory has grown, and how many files and threads more
            there are at the end than in the middle.
        """
        found = {}
        for name, looks in self.looks.items():
            half = looks[len(looks) // 2 :]
            early, late = half[: len(half) // 2], half[len(half) // 2 :]
            means = [sum(one.rss_mb for one in part) / len(part) for part in (early, late)]
            found[name] = (
                means[1] / means[0] - 1,
                late[-1].num_fds - early[0].num_fds,
                late[-1].num_threads - early[0].num_threads,
            )
        return found


def processes() -> dict[str, int]:
    """Return this process and those of engines that it has started, by name."""
    found = {"client": _own_pid()}
    for pid in _below(found["client"]):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        if words.startswith("VLLM::"):
            found[words.removeprefix("VLLM::")] = pid
    return found


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def _below(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_below(child)]
    return found


def wanted_from(model: Any) -> dict[str, Any]:
    """Return what each kind gives on ``model``."""
    return {name: run(model) for name, run in KINDS.items()}
