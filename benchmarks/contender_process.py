"""A contender in a process of its own, which does one thing for each line that it is sent.

    python -m benchmarks.contender_process CONTENDER ARGUMENTS

`Contender` is the side that asks. `in_turns` asks several for the same, back to back and in an
order that turns round each time, so that what else the machine does disturbs all alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Ranks that have just worked still poll for their next step, and would share the other's cores.
SETTLE_S = 0.3
_NOT_TIMED = 2
_SPARE_BYTES = 1 << 30


class ContenderError(Exception):
    """A contender's process has ended, or what it was asked for has failed there."""


class Contender:
    """A contender that is up.

    With a twin there are two processes, which answer in turns: see `start_pair`.

    Args:
        kind: Of `contenders.CONTENDERS`.
        arguments: What it is made with.
        python: The interpreter.
        environment: What is set beside this process's own.

    Attributes:
        start_s: From the start of the process until it takes work.
        seconds: All of that but for what Python takes to import the libraries.

    Raises:
        ContenderError: It did not start.
    """

    def __init__(
        self,
        kind: str,
        arguments: dict[str, Any],
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> None:
        started = time.perf_counter()
        self._command = [python, "-m", "benchmarks.contender_process", kind, json.dumps(arguments)]
        self._environment = {**os.environ, **(environment or {})}
        self._processes: list[subprocess.Popen[str]] = []
        self._num_asked = 0
        self.seconds = self._start()
        self.start_s = time.perf_counter() - started

    def _start(self) -> float:
        process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return float(self._answer(process)["s"])

    def start_twin(self) -> None:
        """Start a second process of the same; from now on the two answer in turns.

        Raises:
            ContenderError: It did not start.
        """
        self._start()

    @property
    def num_processes(self) -> int:
        """How many there are: what has to be asked of all is asked so many times."""
        return len(self._processes)

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ContenderError(f"the process has ended with {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer

    def ask(self, method: str, *args: Any) -> dict[str, Any]:
        """Return what a method of the contender answers; ``cannot`` says why it does not.

        Raises:
            ContenderError: It has failed.
        """
        process = self._processes[self._num_asked % self.num_processes]
        self._num_asked += 1
        assert process.stdin is not None
        print(json.dumps([method, args]), file=process.stdin, flush=True)
        return self._answer(process)

    def close(self) -> None:
        """Let it end."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def start_pair(
    up: ExitStack,
    one: tuple[str, dict[str, Any]],
    other: tuple[str, dict[str, Any]],
    *,
    quick: bool,
) -> dict[str, Contender]:
    """Start two contenders that are to be compared to a percent; return them by kind.

    Of equal engines the one that starts later is faster for as long as they live: here the second
    of five by 5 to 10 % beside the first, and the last by 1 to 3 % beside the second. So the first
    of all is asked for nothing, and each contender has a twin: other, one, other, other, one.
    Where the memory is not enough for five there are no twins, and `other`, the last of three, has
    that advantage.

    Args:
        up: Closes them, and those that were started when one does not start.
        one: Its kind and its arguments.
        other: The same of the other one.
        quick: Start one of each and no more, side by side, for a run that looks at no time.

    Raises:
        ContenderError: One did not start.
    """
    import psutil

    if quick:
        return start_together(up, {one[0]: one, other[0]: other})
    free = psutil.virtual_memory().available
    up.enter_context(closing(Contender(*other)))
    taken = free - psutil.virtual_memory().available
    found = {kind: up.enter_context(closing(Contender(kind, its))) for kind, its in (one, other)}
    if 5 * taken + _SPARE_BYTES > free:
        print(f"  no twins: an engine takes {taken >> 20} MiB of {free >> 20}", file=sys.stderr)
        return found
    for kind, _ in (other, one):
        found[kind].start_twin()
    return found


def start_together(
    up: ExitStack, wanted: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Contender]:
    """Start contenders side by side, for a run that looks at no time; return them by name.

    Args:
        up: Closes them.
        wanted: The kind and the arguments of each, by name.

    Raises:
        ContenderError: One did not start.
    """
    with ThreadPoolExecutor(len(wanted)) as threads:
        coming = {name: threads.submit(Contender, *its) for name, its in wanted.items()}
    for one in coming.values():
        if one.exception() is None:
            up.enter_context(closing(one.result()))
    return {name: one.result() for name, one in coming.items()}


def in_turns(
    contenders: dict[str, Contender],
    rounds: int,
    method: str,
    args: Callable[[str, int], tuple[Any, ...]],
) -> dict[str, list[dict[str, Any]]]:
    """Return ``rounds`` answers of each contender; one that cannot is left out, and named.

    Args:
        contenders: By name.
        rounds: How many answers. Nobody looks at the time of two: there is no pause between them.
        method: What they are asked for.
        args: Given who is asked and the number of the round, the arguments.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(found)
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(SETTLE_S if rounds > _NOT_TIMED else 0)
            answer = contenders[name].ask(method, *args(name, number))
            if "cannot" in answer:
                del found[name]
                print(f"      {name} cannot: {answer['cannot']}", file=sys.stderr)
            else:
                found[name].append(answer)
    return found


# ------------------------------------------------------------------------- the other side


def peak_bytes() -> list[int]:
    """Return the peak resident memory of this process and all below it, largest first.

    Source: proc(5), `VmHWM` in /proc/PID/status.
    """
    import psutil

    found = []
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:  # it has ended in between
            continue
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return sorted(found, reverse=True)


def serve(kind: str, arguments: dict[str, Any]) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer

    def answer(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    from benchmarks.contenders import CONTENDERS, CannotError
    from benchmarks.loads import Load

    if kind in ("ours", "plain"):
        import vllm  # noqa: F401 - so that its import is not counted as a start
    started = time.perf_counter()
    try:
        contender: Any = CONTENDERS[kind](arguments)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"s": time.perf_counter() - started})
    for line in sys.stdin:
        method, args = json.loads(line)
        try:
            if method == "peak_bytes":
                answer({"peak_bytes": peak_bytes()})
            elif method == "run":
                answer(contender.run(Load(*args[0]), args[1]))
            else:
                answer(getattr(contender, method)(*args))
        except CannotError as error:
            answer({"cannot": str(error)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    contender.close()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
