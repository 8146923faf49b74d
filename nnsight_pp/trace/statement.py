"""The frame of a `with` whose body is captured: entering keeps it from running, leaving takes it.

What becomes of the body is the subclass's business: it is run now, stored, or declared.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nnsight_pp.errors import BlockShapeError, Where, explain
from nnsight_pp.trace.capture import WITHIN, BodyCapture, BodySkipped, forget_skip, trace_nothing
from nnsight_pp.trace.clean import without_own_frames
from nnsight_pp.trace.deliver import deliver
from nnsight_pp.trace.names import names_of

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from nnsight_pp.core.block import Block


class BlockStatement:
    """A context manager that takes its body as a block."""

    __slots__ = ("__weakref__", "_capture")

    # Whether the body is run when the `with` is left, so that other items can be entered around it.
    runs_at_once = False

    def __init__(self) -> None:
        self._capture: BodyCapture | None = None

    def _check_entry(self) -> None:
        """Raise where the statement cannot be entered now."""

    def _entered(self) -> Any:
        """Return what `as` binds."""
        return self

    def _take(self, block: Block, frame: FrameType) -> None:
        """Take the body, which ``frame`` holds."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what would keep the model, the frame or the inputs alive."""

    def __enter__(self) -> Any:
        self._check_entry()
        self._capture = capture = BodyCapture(sys._getframe(1))
        if capture.block.around and not self.runs_at_once:
            capture.release()
            self._capture = None
            raise _items_refused(capture.block)
        # Note [Calls and returns are balanced]
        if capture.counting is not None and sys._getframe().f_trace is None:
            capture.counting(sys._getframe(), "return", None)
        entered = self._entered()
        sys.settrace(trace_nothing)
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        capture, self._capture = self._capture, None
        assert capture is not None
        sys.settrace(capture.outer)  # first, so that no call of ours is seen by the other one
        if capture.counting is not None:  # Note [Calls and returns are balanced]
            capture.counting(sys._getframe(), "call", None)
        capture.release()
        try:
            if kind is not BodySkipped and kind is not None:
                return False
            if capture.block.around:
                self._take_within(capture.block, capture.frame)
            else:
                self._take(capture.block, capture.frame)
        except BaseException as raised:
            forget_skip(raised)
            raise without_own_frames(raised)  # noqa: B904 - it is the same exception
        finally:
            self._forget()
        return True

    def _take_within(self, block: Block, frame: FrameType) -> None:
        """Enter the other items of the `with`, as its frame would have done, and take the body."""
        scope = names_of(frame).scope()

        def run() -> None:
            names = scope.own()
            del names[WITHIN]
            deliver(frame, names)
            self._take(block, frame)

        scope[WITHIN] = run
        text = "\n" * (block.first_line - 2) + f"with {block.around}: {WITHIN}()"
        exec(compile(text, block.filename, "exec", flags=block.flags, dont_inherit=True), scope)


def _items_refused(block: Block) -> BlockShapeError:
    """Return the error for context managers behind one whose body is not run at once."""
    return BlockShapeError(
        explain(
            "The tracer must be the last item of its `with`.",
            where=Where(block.filename, block.first_line - 1, block.name),
            why="What stands behind it would be left again before the block runs.",
            todo="Put the other context managers into the block.",
        )
    )
