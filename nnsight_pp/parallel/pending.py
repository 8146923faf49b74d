"""An answer on its way: what a pull returns, on every kind of link."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.location import Location, Visit
from nnsight_pp.core.protocols import DeferredError
from nnsight_pp.errors import (
    InternalError,
    OutOfOrderError,
    PullTimeoutError,
    RankDivergenceError,
    ValueUnavailableError,
    explain,
)
from nnsight_pp.parallel.lane import tensor
from nnsight_pp.parallel.publications import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.parallel.lane import Lane


@final
class PendingAnswer:
    """Resolved once by a link's thread, waited for by the forward thread.

    Args:
        location: What was asked for.
        step: In which step.
        owner: The stage that answers.
        bound_s: The longest wait, in seconds.
        ran: Where this rank is, in words.
        report: Called with what was asked for when the wait has run out of time; returns how far
            the stages are, as a table.
    """

    __slots__ = (
        "_answer",
        "_bound_s",
        "_coming",
        "_lane",
        "_location",
        "_owner",
        "_ran",
        "_report",
        "_step",
        "_taken",
        "_ticket",
        "bytes_received",
        "waited_s",
    )

    def __init__(
        self,
        location: Location,
        step: int,
        owner: int,
        bound_s: float,
        ran: str,
        report: Callable[[Visit], str],
    ) -> None:
        self._location = location
        self._step = step
        self._owner = owner
        self._bound_s = bound_s
        self._ran = ran
        self._report = report
        # Held until the answer is here. An `Event` does the same in several times the steps.
        self._coming = threading.Lock()
        self._coming.acquire()
        self._answer: Answer | None = None
        # Where the extension may have the answer: see `by_lane`.
        self._lane: Lane | None = None
        self._ticket = 0
        self._taken: Callable[[int], None] | None = None
        self.waited_s = 0.0
        self.bytes_received = 0

    def by_lane(self, lane: Lane, ticket: int, taken: Callable[[int], None]) -> None:
        """Note that the answer comes by ``lane``, unless `resolve` gives one.

        ``taken`` is called with the ticket when it did.
        """
        self._ticket, self._taken = ticket, taken
        self._lane = lane

    def resolve(self, answer: Answer, num_bytes: int = 0) -> None:
        """Give the answer, which came as ``num_bytes``. Called once, from any thread."""
        self.bytes_received = num_bytes
        self._answer = answer
        self._coming.release()
        if self._lane is not None:
            self._lane.forget(self._ticket)

    def answer_within(self, bound_s: float) -> Answer | None:
        """Return the answer, or None where it does not come within ``bound_s``."""
        # Only one thread waits, so whoever finds no answer has not taken the lock either.
        if self._answer is None:
            if self._lane is None:
                self._coming.acquire(timeout=max(0.0, bound_s))
            elif (came := self._lane.wait(self._ticket, bound_s)) is not None:
                self._take(*came)
        return self._answer

    def _take(self, code: int, shape: tuple[int, ...], memory: Any, num_bytes: int) -> None:
        assert self._taken is not None
        self.bytes_received = num_bytes
        try:
            self._answer = Answer("value", tensor(code, shape, memory))
        except Exception as error:
            self._answer = Answer("error", f"{type(error).__name__}: {error}")
        self._taken(self._ticket)

    @property
    def is_resolved(self) -> bool:
        """Whether the answer is here."""
        return self.answer_within(0.0) is not None

    def wait(self) -> Any:
        """Return the value, or raise what the owner answered. See `protocols.Pending`."""
        start = time.perf_counter()
        answer = self.answer_within(self._bound_s)
        self.waited_s += time.perf_counter() - start
        visit = Visit(self._location, self._step)
        if answer is None:
            raise PullTimeoutError(
                explain(
                    f"Stage {self._owner} did not answer for {visit} within {self._bound_s:g} s.",
                    grid=self._report(visit),
                    why="A stage waits only for answers that exist already, so the other stage is "
                    "stuck or gone.",
                    todo="Look at its log, and at what `kill -USR1` of its process prints there; "
                    "NNSIGHT_PP_PULL_TIMEOUT_S sets the bound.",
                    ran=self._ran,
                )
            )
        if answer.kind == "value":
            return answer.value
        if answer.kind == "closed":
            raise OutOfOrderError(
                explain(
                    f"{visit} was asked for, but the model already ran past it or never computes "
                    "it.",
                    why=f"Stage {self._owner}, which owns it, closed the step without serving it: "
                    "its copy of the block asked for it too late.",
                    todo="Ask for values in the order in which the model computes them.",
                    ran=self._ran,
                )
            )
        if answer.kind == "deferred":
            raise DeferredError(str(visit))
        if answer.kind == "diverged":
            raise RankDivergenceError(
                explain(
                    f"Stage {self._owner} asked for {answer.value} where this rank asked for "
                    f"{visit}.",
                    why="Every rank runs the same block and must take the same branches.",
                    todo="Make the block independent of time, process ids, and set order.",
                    ran=self._ran,
                )
            )
        if answer.kind == "error":
            raise ValueUnavailableError(
                explain(
                    f"Stage {self._owner} cannot send {visit}: {answer.value}",
                    why="A value of another stage is sent only when a line needs it.",
                    todo="Read the part that you need (an index, a tensor) instead.",
                    ran=self._ran,
                )
            )
        raise InternalError(f"unknown answer {answer.kind!r} for {visit}")
