"""`with tracer.iter[...]:`, the older form of `for step in tracer.iter[...]:`.

The body of the `with` is captured like a block, and run once per step where it stands. Unlike the
loop it does not end the block around it when the run has fewer steps.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, final

from nnsight_pp.errors import NNsightDeprecationWarning
from nnsight_pp.interleave.steps import Selection, Steps
from nnsight_pp.interleave.worker import LoopCut
from nnsight_pp.trace.deliver import deliver
from nnsight_pp.trace.names import names_of
from nnsight_pp.trace.statement import BlockStatement

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from nnsight_pp.core.block import Block


@final
class StepChoice:
    """What `tracer.iter` returns: index it to choose steps, or loop over it for all of them."""

    __slots__ = ()

    def __getitem__(self, selection: Selection) -> StepLoop:
        """Loop over the steps of ``selection``; without an end, until the run ends."""
        return StepLoop(Steps()[selection])

    def __iter__(self) -> Iterator[int]:
        return Steps()[:]


@final
class StepLoop(BlockStatement):
    """The chosen steps: loop over them. As a `with` it is deprecated.

    Args:
        steps: The steps, each of which waits for its turn.
    """

    __slots__ = ("_steps",)

    def __init__(self, steps: Iterator[int]) -> None:
        super().__init__()
        self._steps = steps

    def __iter__(self) -> Iterator[int]:
        return self._steps

    def __next__(self) -> int:
        return next(self._steps)

    def _check_entry(self) -> None:
        warnings.warn(
            "The block form is deprecated: write `for step in tracer.iter[...]:`.",
            NNsightDeprecationWarning,
            stacklevel=3,
        )

    def _take(self, block: Block, frame: FrameType) -> None:
        """Run the body once per step."""
        # The name behind `as` holds this object: in the body it is the step.
        names = names_of(frame)
        scope = names.scope()
        counters = [name for name, value in names.around[0].items() if value is self]
        code = block.code()
        try:
            for step in self._steps:
                for name in counters:
                    scope[name] = step
                exec(code, scope)
        except LoopCut:  # the run has fewer steps, and the block goes on
            pass
        finally:
            close = getattr(self._steps, "close", None)
            if close is not None:
                close()
        binds = {*block.binds(), *counters}
        deliver(frame, {name: value for name, value in scope.own().items() if name in binds})
