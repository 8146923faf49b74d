"""The object behind `with model.trace(...) as tracer:`.

Entering captures the body and keeps it from running; leaving runs it beside the model and writes
what it saved into the user's names. A trace without an input of its own only collects: its body
runs at once, and each `with tracer.invoke(...)` in it becomes one prompt with one block.

How a block is run is an engine's business: it hands a `Tracer` one function.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NoReturn, final

from nnsight_pp.core.block import Scope
from nnsight_pp.core.location import RESULT
from nnsight_pp.core.raw_writes import WORDS
from nnsight_pp.core.saved import SavedSet, active_saves
from nnsight_pp.errors import (
    BlockShapeError,
    ConfigurationError,
    EarlyStopException,
    NotSupportedError,
    explain,
)
from nnsight_pp.interleave.barrier import Barrier
from nnsight_pp.interleave.reach import may_mention
from nnsight_pp.interleave.worker import current_worker
from nnsight_pp.trace.clean import raise_again
from nnsight_pp.trace.deliver import deliver
from nnsight_pp.trace.mount import savable
from nnsight_pp.trace.names import (
    BoundNames,
    CollectingScope,
    Names,
    SiblingNames,
    bound_around,
    names_of,
)
from nnsight_pp.trace.pull_table import PullTable
from nnsight_pp.trace.statement import BlockStatement
from nnsight_pp.trace.step_block import StepChoice, StepLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from nnsight_pp.core.block import Block

    # Runs the invocations; fills `Invocation.bound`, and returns an exception to raise in the
    # user's frame after the names were written, or None.
    Run = Callable[["Tracer", list["Invocation"]], BaseException | None]


# Never changed: what most invocations bind and tell.
_NOTHING: Mapping[str, Any] = {}
# Of a tracer that is not running.
_NO_SAVES = SavedSet()


class BlockTracer:
    """What a block may use of its tracer, in this process and on every rank."""

    __slots__ = ()

    @property
    def iter(self) -> StepChoice:
        """Steps to loop over: `for step in tracer.iter[:3]`."""
        return StepChoice()

    def all(self) -> StepLoop:
        """Loop over every step of the run."""
        return StepChoice()[:]

    def cache(
        self,
        modules: Sequence[Any] | None = None,
        *,
        device: Any = "cpu",
        dtype: Any = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> Any:
        """Keep what modules give from now on, after all edits; the first thing a block may do.

        Args:
            modules: Nodes or paths. Default: every module.
            device: Where the values are kept; None leaves them where they are.
            dtype: What floating values are cast to.
            detach: Whether they leave the autograd graph.
            include_output: Whether outputs are kept.
            include_inputs: Whether inputs are kept.
            non_blocking: Whether copies from a GPU may still be on their way.
        """
        worker = current_worker("`tracer.cache`")
        assert worker.turns is not None
        options = {
            "device": device, "dtype": dtype, "detach": detach, "include_output": include_output,
            "include_inputs": include_inputs, "non_blocking": non_blocking,
        }  # fmt: skip
        surface = worker.turns.surface_for(worker, "`tracer.cache`")
        return surface.cache(worker, modules, options)

    def stop(self) -> NoReturn:
        """End the run here: what the model would go on to compute is not computed."""
        worker = current_worker("`tracer.stop`")
        assert worker.turns is not None
        worker.turns.surface_for(worker, "`tracer.stop`")
        if worker.timeline is not None:
            raise NotSupportedError(
                explain(
                    "`tracer.stop` was called.",
                    where=worker.where(),
                    why="On an engine it ends one request, and this block shares names or a "
                    "barrier with others.",
                    todo="Give the request a smaller `max_tokens`.",
                )
            )
        raise EarlyStopException("`tracer.stop` ended the run")

    def barrier(self, count: int) -> Barrier:
        """Return what ``count`` blocks call to wait for one another."""
        return Barrier(count)

    @property
    def result(self) -> Any:
        """What the traced call returned. The last thing that a block can read."""
        worker = current_worker("`tracer.result`")
        assert worker.turns is not None
        return savable(worker.turns.read(worker, RESULT))


@final
class Invocation:
    """One prompt with one block.

    Attributes:
        inputs: Positional inputs.
        kwargs: Keyword inputs and options.
        block: The captured body.
        names: What the block sees from around it.
        saves: The objects marked by `save`, in this process.
        frame: The id of the frame in which it is written, where it stands in an invoke.
        scope: The names of the block, where it runs in this process.
        bound: Filled by the engine: what the block bound, or what came back of it.
        is_saved: Whether ``bound`` holds only what was saved.
        is_over: Whether the block has run to its end, where it runs in this process.
        warnings: Texts for the user, shown at the `with` after the names were written.
    """

    __slots__ = (
        "block", "bound", "frame", "inputs", "is_over", "is_saved", "kwargs", "names", "saves",
        "scope", "warnings",
    )  # fmt: skip

    def __init__(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        block: Block,
        names: Names,
        saves: SavedSet,
        frame: int = 0,
    ) -> None:
        self.inputs = inputs
        self.kwargs = kwargs
        self.block = block
        self.names = names
        self.saves = saves
        self.frame = frame
        self.scope = Scope(*names.around)
        self.bound: Mapping[str, Any] = _NOTHING
        self.is_saved = self.is_over = False
        self.warnings: Sequence[str] = ()

    def run(self) -> None:
        """Run the block in this process, beside a model."""
        try:
            exec(self.block.known.code, self.scope)
        finally:
            self.is_over = True

    def reaches_raw(self) -> bool:
        """Whether what the block calls may edit a tensor in a way that torch does not count."""
        return may_mention(self.block.known.code, self.scope, self.block.reads(), WORDS)

    def warn(self, texts: Sequence[str]) -> None:
        """Show ``texts`` to the user when the run is over."""
        self.warnings = (*self.warnings, *texts)

    def take_bound(self) -> None:
        """Fill `bound` with what the block has bound in `scope`."""
        names = self.block.known.facts.binds
        if names:
            self.bound = self.scope.own_of(names)


def _bound_by(block: Block, scope: Scope) -> Mapping[str, Any]:
    names = block.binds()
    return scope.own_of(names) if names else _NOTHING


@final
class Tracer(BlockStatement, BlockTracer):
    """One run of a model with blocks beside it.

    Args:
        run: Runs the invocations; an engine's function.
        inputs: Positional inputs of the trace. With any input, the body is the one block.
        kwargs: Keyword inputs and options.
        has_input: Whether the trace has an input of its own.
    """

    __slots__ = (
        "_body",
        "_bound",
        "_frames",
        "_has_input",
        "_inputs",
        "_invocations",
        "_is_collecting",
        "_kwargs",
        "_run",
        "_saves",
        "is_nested",
        "statistics",
    )

    runs_at_once = True

    def __init__(
        self,
        run: Run,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_input: bool,
    ) -> None:
        self._capture = None
        # None once it has run: a tracer is good for one run.
        self._run: Run | None = run
        self._inputs = inputs
        self._kwargs = kwargs
        self._has_input = has_input
        self._saves = _NO_SAVES
        self._invocations: list[Invocation] = []
        # Where the invokes are written. Kept until the run is over, so that their ids are.
        self._frames: list[FrameType] = []
        self._bound: dict[int, BoundNames] = {}
        self._body: CollectingScope
        self._is_collecting = False
        self.statistics: dict[str, Any] = {}
        # Whether all names flow back, into a block around it.
        self.is_nested = False

    @property
    def stats(self) -> PullTable:
        """What crossed between stages, once the run is over, by stage pair and line.

        Each row has the number of pulls, bytes, and milliseconds that the forward stood still for
        them; printed, it is a table. Empty for a model in this process.
        """
        return PullTable.of(self.statistics.get("pulls", ()))

    def _check_entry(self) -> None:
        if self._run is None or self._capture is not None:
            raise BlockShapeError(
                explain(
                    "This tracer has already been used.",
                    why="A tracer is good for one `with`.",
                    todo="Call `model.trace(...)` again.",
                )
            )
        outermost = active_saves.get()
        self._saves = SavedSet() if outermost is None else outermost

    def _take(self, block: Block, frame: FrameType) -> None:
        run, self._run = self._run, None
        assert run is not None
        self._execute(run, block, frame)

    def invoke(self, *inputs: Any, **kwargs: Any) -> InvokeStatement:
        """Add one prompt with one block of its own; use it as `with tracer.invoke(prompt):`."""
        if not self._is_collecting:
            raise BlockShapeError(
                explain(
                    "`tracer.invoke` was called where the model is already running, or outside of "
                    "its trace.",
                    why="Invokes are collected before the model runs.",
                    todo="Give `trace()` no input, and each `tracer.invoke(...)` its own.",
                )
            )
        return InvokeStatement(self, inputs, kwargs)

    def _add(
        self, block: Block, frame: FrameType, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        here = id(frame)
        bound = self._bound.get(here)
        if bound is None:
            self._frames.append(frame)
            bound = self._bound[here] = BoundNames()
        bound.add(block)
        position, around = len(self._invocations), bound_around(frame)
        siblings = SiblingNames(self._invocations, position, here, bound, around)
        names = names_of(frame, siblings)
        self._invocations.append(Invocation(inputs, kwargs, block, names, self._saves, here))
        self._body.num_invokes = position + 1

    def _execute(self, run: Run, block: Block, frame: FrameType) -> None:
        # Only now: the name behind `as` was bound after `__enter__` had returned.
        names = names_of(frame)
        self.is_nested = names.is_block
        own: Mapping[str, Any] = _NOTHING
        if self._has_input:
            self._invocations.append(
                Invocation(self._inputs, self._kwargs, block, names, self._saves)
            )
        else:
            self._body = CollectingScope(*names.around)
            own = self._collect(block, self._body)
        error = run(self, self._invocations)
        self._write(frame, own, is_block=names.is_block)
        if error is not None:
            raise_again(error)
        for invocation in self._invocations:
            for text in invocation.warnings:
                warnings.warn(text, UserWarning, stacklevel=4)

    def _collect(self, block: Block, scope: Scope) -> Mapping[str, Any]:
        """Run the trace's own body, which declares the invokes; return the names it bound."""
        token = active_saves.set(self._saves)
        self._is_collecting = True
        try:
            exec(block.code(), scope)
        finally:
            self._is_collecting = False
            active_saves.reset(token)
        if not self._invocations:
            raise ConfigurationError(
                explain(
                    "The trace needs an input or at least one invoke.",
                    todo="Write `model.trace(prompt)`, or `with tracer.invoke(prompt):` inside.",
                )
            )
        return _bound_by(block, scope)

    def _write(self, frame: FrameType, own: Mapping[str, Any], *, is_block: bool) -> None:
        """Write names into the user's frame: all into a block around it, else the saved ones."""
        saves = self._saves
        found = dict(own) if is_block else saves.marked_of(own)
        for invocation in self._invocations:
            if is_block or invocation.is_saved:
                found.update(invocation.bound)
            elif invocation.bound:
                found.update(saves.marked_of(invocation.bound))
        if found:
            deliver(frame, found)

    def _forget(self) -> None:
        self._run = None
        self._inputs, self._kwargs, self._saves = (), {}, _NO_SAVES
        # The names of each invocation lead back to this list.
        self._invocations.clear()
        self._frames.clear()
        self._body = CollectingScope()


@final
class InvokeStatement(BlockStatement):
    """`with tracer.invoke(prompt):` - captures its body as one block."""

    __slots__ = ("_inputs", "_kwargs", "_tracer")

    def __init__(self, tracer: Tracer, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._capture = None
        self._tracer = tracer
        self._inputs = inputs
        self._kwargs = kwargs

    def _entered(self) -> Tracer:
        return self._tracer

    def _take(self, block: Block, frame: FrameType) -> None:
        self._tracer._add(block, frame, self._inputs, self._kwargs)
