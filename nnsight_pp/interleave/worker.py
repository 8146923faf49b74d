"""The greenlet that runs one block, for one request, on one rank.

A worker and the model never run at the same time: the model's thread switches to the worker, and
gets the turn back when the worker parks or ends. A worker that ended by an exception keeps it in
`error`; nothing that a block raises ever travels through the model's frames.

What a worker may ask for is `interleave.asks`; who answers is `interleave.interleaver`.
"""

from __future__ import annotations

import functools
import sys
import zlib
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, final

from greenlet import GreenletExit, getcurrent

from nnsight_pp.core.saved import SavedSet, active_saves
from nnsight_pp.errors import (
    BlockError,
    InternalError,
    OutsideTraceError,
    RankDivergenceError,
    Where,
    explain,
)
from nnsight_pp.interleave.shell import Shell, shell_for, take_back

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from nnsight_pp.core.ask import Ask
    from nnsight_pp.core.location import Location, Visit
    from nnsight_pp.core.protocols import Cut
    from nnsight_pp.core.report import PullRecord
    from nnsight_pp.interleave.asks import Asks
    from nnsight_pp.interleave.habits import Habits
    from nnsight_pp.interleave.nearby import Near
    from nnsight_pp.interleave.randomness import Randomness
    from nnsight_pp.interleave.timeline import Timeline
    from nnsight_pp.interleave.visit import OpenVisit


# The step of a worker that has not begun any.
NEVER = -1


class LoopCut(GreenletExit):
    """Thrown into a worker whose loop asks for a step that the run never makes."""


class Memo(NamedTuple):
    """The last value a worker asked for: asked again at once, it is the same object."""

    location: Location
    step: int
    value: Any  # any served value
    is_here: bool


class Mark(NamedTuple):
    """How far a worker has asked its way through the model: forward only, within a step."""

    step: int
    stage: int
    # The place within the stage, where the order of its locations is known.
    position: int | None
    place: Location | None = None
    # How often in a row it had asked at this very place before, which holds several values.
    times: int = 0


_START = Mark(-1, -1, None)


class ClosedEarly(NamedTuple):
    """See Note [A wait for a call closes the visit] in `interleave.asks`."""

    visit: OpenVisit
    edited: Visit
    # What was waited for, in words, and the line that waited.
    wait: str
    where: Where | None


@final
class Worker:
    """One block at work.

    Args:
        request: The request's name, alike on every rank.
        run: Runs the block to its end.
        filename: Where the block's source stands, to find the user's line in a stack.
        slot: This worker's place for torch's thread-local state.
        saves: Where `save` marks objects. Default: a set of the worker's own.
        context: Context variables that the block sees. Default: those of the caller.
        randomness: The random numbers that the block draws. Default: those of the process.
    """

    # Known to csrc/near.hpp by their names.
    __slots__ = (
        "_context", "_echoes", "_run", "apart_by", "ask", "asked", "closed_early", "cut", "error",
        "error_at", "failed_at", "filename", "greenlet", "habits", "has_ended", "held_up",
        "is_calling", "is_dropped", "is_relaxed", "loop_depth", "mark", "memo", "near",
        "note_growth", "pulls", "randomness", "reached", "reaches_raw", "request", "rows_of",
        "saves", "seat", "slot", "step", "timeline", "trail", "turns", "unshared", "visit",
        "warnings", "writes_raw",
    )  # fmt: skip

    def __init__(
        self,
        request: str,
        run: Callable[[], None],
        filename: str,
        slot: Any,
        *,
        saves: SavedSet | None = None,
        context: Context | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        self.request = request
        # Its block's place among those beside it: at one location they are served in that order.
        self.seat = 0
        self.rows_of = request  # a stored edit has a name of its own, and another's rows
        self.timeline: Timeline | None = None  # where blocks share names on an engine
        self.note_growth: Callable[[Mark], None] | None = None  # `core.growth`, before others run
        self.filename = filename
        self.slot = slot
        self._run: Callable[[], None] | None = run
        self._context = copy_context() if context is None else context
        self.saves = SavedSet() if saves is None else saves
        self.randomness = randomness
        self.turns: Asks | None = None
        self.near: Near | None = None  # where `interleave.nearby` may answer
        self.cut: Cut | None = None
        # Invariant: `ask` is set exactly while the worker is parked.
        self.ask: Ask | None = None
        # Invariant: alike on every rank at the same line of the block. `trail` is a checksum of
        # what was asked for: ranks whose trails differ at the end took different branches.
        self.asked = self.trail = self.step = 0
        self.mark = _START
        # The furthest step whose gate this worker has passed.
        self.reached = NEVER
        # A call that this worker waited for until its rank's forward was over, until it catches up.
        self.held_up: Visit | None = None
        self.apart_by: RankDivergenceError | None = None  # see `agreement`
        self.is_calling = False  # whether it runs a module, where it must not park
        # What was brought from other stages, by owner, location and line.
        self.pulls: dict[tuple[int, Location, int], PullRecord] = {}
        self.habits: Habits | None = None  # since it brought a value of an earlier stage
        self.loop_depth = 0
        self.memo: Memo | None = None
        self.is_relaxed = False  # only where a loop pins visits: see `clock.VisitClock`
        # Invariant: set only from when a value was served until it asks for another, parks or ends.
        self.visit: OpenVisit | None = None
        self.closed_early: ClosedEarly | None = None
        self.error: BaseException | None = None
        self.error_at: Where | None = None  # where its block has no line any more
        # See Note [Errors that one stage sees alone] in `interleave.asks`.
        self.unshared: BaseException | None = None
        self._echoes: tuple[BaseException, ...] = ()
        # 2n after n asks, 2n + 1 when ask n was refused: the smallest, echoes apart, came first.
        self.failed_at = 0
        # `is_dropped`: no answer is kept for it any more; `writes_raw`: see `core.raw_writes`.
        self.has_ended = self.is_dropped = self.writes_raw = False
        self.reaches_raw: Callable[[], bool] | None = None  # where that is asked for late
        self.warnings: tuple[str, ...] = ()
        # Whoever gives it the turn makes itself its parent first. None once the block has ended.
        self.greenlet: Any = shell_for(self, self._context)  # its `parent` may be any greenlet

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else f"parked on {self.ask}" if self.ask else "running"
        return f"<Worker {self.request} {state}>"

    def run(self) -> None:
        """Run the block to its end; called by its greenlet."""
        if active_saves.get() is not self.saves:
            active_saves.set(self.saves)
        run, self._run = self._run, None  # the worker outlives its names
        assert run is not None
        try:
            run()
        except LoopCut:
            pass  # the loop outran the run; `interleaver.finish` has noted the warning
        except BaseException as error:
            self.error = error
        if self.note_growth is not None:
            self.note_growth(self.mark)
        if self.unshared is None:
            self.failed_at = 2 * self.asked + isinstance(self.error, BlockError)
        elif self.error is not self.unshared:
            self.error = self.unshared
            if not self.is_echo:
                self.error.add_note(
                    "The block caught this error. It is raised anyway: other stages do not see it, "
                    "and would have gone another way."
                )
        self.has_ended = True

    def alone(self, error: Exception, *, at: int | None = None, is_echo: bool = False) -> Exception:
        """Remember that only this rank sees ``error``; return it.

        Args:
            error: What is raised in the block next.
            at: The number of the ask that it refuses. Default: it is raised between two asks.
            is_echo: Whether it came from another stage, whose own error is the better one.
        """
        if self.unshared is None:
            self.unshared = error
            if self.has_ended and self.error is None:
                self.error = error
            self.failed_at = 2 * self.asked if at is None else 2 * at + 1
            if self.turns is not None and self.turns.link is not None:
                text = f"{type(error).__name__}: {error}"
                self.turns.link.fail(self.request, text)  # nobody waits for what never comes
            if self.timeline is not None:
                self.timeline.fail(self, error)
        if is_echo:
            self._echoes = (*self._echoes, error)
        return error

    def leave_greenlet(self) -> None:
        """Give the greenlet back, if the block has come to its end in it."""
        shell = self.greenlet
        if shell is not None and shell.worker is None:
            self.greenlet = None
            take_back(shell)

    @property
    def is_echo(self) -> bool:
        """Whether `error` only repeats what happened on another stage."""
        return any(error is self.error for error in self._echoes)

    def let_go(self) -> None:
        """Drop what the block has seen and saved: a worker and its greenlet hold each other."""
        self.is_dropped = True
        self.memo = None
        self.saves = SavedSet()
        self._context.run(active_saves.set, None)

    def abandon(self) -> None:
        """Give up on a block that catches whatever it is thrown and asks on."""
        where = self.where()
        self.error = BlockError(
            explain(
                "The block went on after its request was over, whatever was raised in it.",
                where=where,
                why="An `except` or `finally` in it swallows every error and asks for more.",
                todo="Catch only what you expect, and leave loops when it is raised.",
            )
        )
        self.has_ended = True

    @property
    def is_current(self) -> bool:
        """Whether the caller runs inside this worker."""
        return getcurrent() is self.greenlet

    def hand_over(self) -> Any:
        """Give the turn back to the driver; return what the worker is resumed with."""
        if self.note_growth is not None:
            self.note_growth(self.mark)
        parent = self.greenlet.parent
        if parent is None:
            raise InternalError(f"{self!r} parks with nobody to give the turn to")
        return parent.switch()

    def next_number(self, location: Location, visit: int) -> int:
        """Return the number of the ask that is made now."""
        number = self.asked
        self.asked = number + 1
        self.trail = zlib.crc32(b"%d" % visit, zlib.crc32(_noted(location), self.trail))
        return number

    def note(self, text: str) -> None:
        """Note what every rank must do alike at this line, beside its asks."""
        self.trail = zlib.crc32(text.encode(), self.trail)

    def is_inside_torch(self) -> bool:
        """Whether the running worker's stack holds a handler that torch's own frames have called.

        Only asked where a park there must be refused.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
                return True
            frame = frame.f_back
        return False

    def shares_names_with(self, other: Worker) -> bool:
        """Whether this worker's block may hold what ``other``'s has asked for."""
        return self.timeline is not None and self.timeline is other.timeline

    def may_write_raw(self, seen: object) -> bool:
        """Whether the block, or what it calls, may edit values in a way that torch does not count.

        Args:
            seen: How it sees the value. None: as it is, where such a write lands by itself in this
                process, and only the block's own text is asked.

        Cost: in this process, where only views need it, a look at what the block reaches; of the
        same functions the answer is kept.
        """
        if seen is not None and self.reaches_raw is not None and not self.writes_raw:
            self.writes_raw = self.reaches_raw()
            self.reaches_raw = None
        return self.writes_raw

    def where(self) -> Where | None:
        """Return the block's line at which this worker is, or None when it is not known."""
        frame: FrameType | None = None
        if self.is_current:
            frame = sys._getframe()
        elif self.greenlet is not None:
            frame = self.greenlet.gr_frame
        while frame is not None and frame.f_code.co_filename != self.filename:
            frame = frame.f_back
        if frame is None:
            return None
        return Where(self.filename, frame.f_lineno, frame.f_code.co_name)


@functools.lru_cache(maxsize=4096)
def _noted(location: Location) -> bytes:
    return f"{location}#".encode()


def running_worker() -> Worker | None:
    """Return the worker inside which the caller runs, or None."""
    current = getcurrent()
    return current.worker if isinstance(current, Shell) else None


def current_worker(name: object) -> Worker:
    """Return the worker inside which the caller runs.

    Raises:
        OutsideTraceError: There is none; ``name`` says what was touched.
    """
    current = getcurrent()
    if isinstance(current, Shell) and current.worker is not None:
        return current.worker
    raise OutsideTraceError(
        explain(
            f"{name} was used outside of interleaving.",
            why="Values of a model exist only while a block runs beside it.",
            todo="Use it inside `with model.trace(...):`, or inside `tracer.invoke(...)` when the "
            "trace has no input of its own.",
        )
    )
