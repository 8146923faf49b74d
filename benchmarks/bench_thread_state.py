"""What a round trip to a worker costs, with and without the exchange of torch's thread state.

One round trip is driver -> worker -> driver. All variants run in one process, in turns, so that
a busy machine disturbs them alike. Prints one Markdown table and the line of the environment.

    python -m benchmarks.bench_thread_state [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import greenlet
import torch

from benchmarks.findings import Finding, main
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension

ROUND_TRIPS_PER_SAMPLE = 200

extension = load_extension()
native = thread_state.load()
driver = greenlet.getcurrent()
Loop = Callable[[int], None]
# Its workers park for ever.
_alive: list[dict[str, Loop]] = []


class Lazy:
    """Parks for ever inside the torch call that meets it."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> None:
        park()


def park() -> None:
    while True:
        driver.switch()


def park_in_torch() -> None:
    torch.ones_like(Lazy())


def park_in_no_grad() -> None:
    with torch.no_grad():
        park()


def park_in_mode() -> None:
    with torch.overrides.BaseTorchFunctionMode():
        park()


def bare(block: Callable[[], None]) -> Loop:
    worker = greenlet.greenlet(block)
    worker.switch()

    def loop(count: int) -> None:
        for _ in range(count):
            worker.switch()

    return loop


def exchanged(block: Callable[[], None], state: thread_state.ThreadState = native) -> Loop:
    worker, slot, switch = greenlet.greenlet(block), state.new_slot(True), state.switch
    switch(slot, worker, ())

    def loop(count: int) -> None:
        for _ in range(count):
            switch(slot, worker, ())

    return loop


def in_inference_mode(loop: Loop) -> Loop:
    def wrapped(count: int) -> None:
        with torch.inference_mode():
            loop(count)

    return wrapped


def with_full_snapshots(loop: Loop) -> Loop:
    def wrapped(count: int) -> None:
        extension.set_full_snapshots(True)
        try:
            loop(count)
        finally:
            extension.set_full_snapshots(False)

    return wrapped


def two_calls(block: Callable[[], None]) -> Loop:
    """Exchange with snapshots taken and installed from Python."""
    worker = greenlet.greenlet(block)
    capture, install = extension.capture, extension.install
    kept, driver = capture(), capture()
    worker.switch()
    install(driver)

    def loop(count: int) -> None:
        nonlocal kept
        for _ in range(count):
            driver = capture()
            install(kept)
            try:
                worker.switch()
            finally:
                kept = capture()
                install(driver)

    return loop


def traced(block: Callable[[], None]) -> Loop:
    """Exchange in a callback of `greenlet.settrace`, which runs at every switch."""
    worker = greenlet.greenlet(block)
    capture, install = extension.capture, extension.install
    kept: dict[greenlet.greenlet, Any] = {worker: capture()}

    def exchange(event: str, pair: tuple[greenlet.greenlet, greenlet.greenlet]) -> None:
        if event in ("switch", "throw"):
            origin, target = pair
            kept[origin] = capture()
            install(kept[target])

    def loop(count: int) -> None:
        greenlet.settrace(exchange)
        try:
            for _ in range(count):
                worker.switch()
        finally:
            greenlet.settrace(None)

    loop(1)
    return loop


def variants() -> dict[str, Loop]:
    os.environ["NNSIGHT_PP_TLS_SWAP"] = "0"
    plain = thread_state.load()
    return {
        "bare `greenlet.switch`": bare(park),
        "exchange, usual case": exchanged(park),
        "exchange, driver in inference mode": in_inference_mode(exchanged(park)),
        "exchange, parked in `no_grad`": exchanged(park_in_no_grad),
        "exchange, parked in a function mode": exchanged(park_in_mode),
        "exchange, parked inside a torch call": exchanged(park_in_torch),
        "full snapshots (unknown torch), usual case": with_full_snapshots(exchanged(park)),
        "full snapshots, parked inside a torch call": with_full_snapshots(exchanged(park_in_torch)),
        "snapshots by calls from Python": two_calls(park),
        "snapshots in `greenlet.settrace`": traced(park),
        "`NNSIGHT_PP_TLS_SWAP=0`": exchanged(park, plain),
    }


def measure(loops: dict[str, Loop], num_samples: int) -> dict[str, list[float]]:
    """Return microseconds per round trip, `num_samples` of each variant, taken in turns."""
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(num_samples):
        for name, loop in loops.items():
            start = time.perf_counter_ns()
            loop(ROUND_TRIPS_PER_SAMPLE)
            spent = time.perf_counter_ns() - start
            samples[name].append(spent / 1000 / ROUND_TRIPS_PER_SAMPLE)
    return samples


def findings(*, quick: bool) -> list[Finding]:
    """Return each round trip beside a bare one."""
    loops = variants()
    _alive.append(loops)
    samples = measure(loops, 10 if quick else 400)
    titles = list(samples)
    bare_title, bare_samples = titles[0], samples[titles[0]]
    return [
        Finding(f"round_trip_{number}", title, samples[title], bare_samples, bare_title)
        for number, title in enumerate(titles)
        if number
    ]


if __name__ == "__main__":
    status = main(findings, __doc__)
    sys.stdout.flush()
    # The workers of the variants park for ever; leave without unwinding them.
    os._exit(status)
