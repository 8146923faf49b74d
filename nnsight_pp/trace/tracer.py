"""The object behind `with model.trace(...) as tracer:`.

Entering captures the body and keeps it from running; leaving runs it beside the model and writes
what it saved into the user's names. A trace without an input of its own only collects: its body
runs at once, and each `with tracer.invoke(...)` in it becomes one prompt with one block.

How a block is run is an engine's business: it hands a `Tracer` one function.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.block import Block, Scope
from nnsight_pp.core.location import RESULT
from nnsight_pp.core.saved import SavedSet, active_saves
from nnsight_pp.errors import BlockError, ConfigurationError, explain
from nnsight_pp.interleave.steps import Steps
from nnsight_pp.interleave.worker import current_worker, running_worker
from nnsight_pp.trace.capture import BodyGuard, BodySkipped, block_at, forget_skip
from nnsight_pp.trace.deliver import deliver
from nnsight_pp.trace.mount import savable
from nnsight_pp.trace.names import Names, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType


class BlockTracer:
    """What a block may use of its tracer, in this process and on every rank."""

    __slots__ = ()

    @property
    def iter(self) -> Steps:
        """Steps to loop over: `for step in tracer.iter[:3]`."""
        return Steps()

    def all(self) -> Iterator[int]:
        """Loop over every step of the run."""
        return Steps()[:]

    @property
    def result(self) -> Any:
        """What the traced call returned. The last thing that a block can read."""
        worker = current_worker("`tracer.result`")
        assert worker.turns is not None
        return savable(worker.turns.read(worker, RESULT))


@dataclass(slots=True)
class Invocation:
    """One prompt with one block.

    Attributes:
        inputs: Positional inputs.
        kwargs: Keyword inputs and options.
        block: The captured body.
        names: What the block sees from around it.
        saves: The objects marked by `save`, in this process.
        bound: Filled by the engine: what the block bound, or what came back of it.
        is_saved: Whether ``bound`` holds only what was saved.
    """

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    block: Block
    names: Names
    saves: SavedSet
    scope: Scope = field(init=False)
    bound: dict[str, Any] = field(default_factory=dict)
    is_saved: bool = False

    def __post_init__(self) -> None:
        self.scope = self.names.scope()

    def take_bound(self) -> None:
        """Fill `bound` with what the block has bound in `scope`."""
        own = self.scope.own()
        self.bound = {name: own[name] for name in self.block.binds() if name in own}


@final
class SiblingNames:
    """The names that the invokes of one trace have bound so far; a later invoke's wins."""

    __slots__ = ("_invocations",)

    def __init__(self, invocations: list[Invocation]) -> None:
        self._invocations = invocations

    def __getitem__(self, name: str) -> Any:
        for invocation in reversed(self._invocations):
            own = invocation.scope.own()
            if name in own:
                return own[name]
        raise KeyError(name)


@final
class Tracer(BlockTracer):
    """One run of a model with blocks beside it.

    Args:
        run: Runs the invocations; an engine's function. It fills `Invocation.bound`, and returns
            an exception to raise in the user's frame after the names were written, or None.
        inputs: Positional inputs of the trace. With any input, the body is the one block.
        kwargs: Keyword inputs and options.
        has_input: Whether the trace has an input of its own.
    """

    __slots__ = (
        "_block",
        "_frame",
        "_guard",
        "_has_input",
        "_inputs",
        "_invocations",
        "_is_collecting",
        "_kwargs",
        "_names",
        "_run",
        "_saves",
        "statistics",
    )

    def __init__(
        self,
        run: Callable[[Tracer, list[Invocation]], BaseException | None],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_input: bool,
    ) -> None:
        self._run = run
        self._inputs = inputs
        self._kwargs = kwargs
        self._has_input = has_input
        self._frame: FrameType | None = None
        self._guard: BodyGuard | None = None
        self._block: Block | None = None
        self._names: Names | None = None
        self._saves: SavedSet | None = None
        self._invocations: list[Invocation] = []
        self._is_collecting = False
        self.statistics: dict[str, Any] = {}

    def __enter__(self) -> Tracer:
        if running_worker() is None and self._is_collecting:
            raise BlockError("this tracer is already running")
        frame = sys._getframe(1)
        self._block = block_at(frame)
        self._frame = frame
        self._saves = active_saves.get() or SavedSet()
        self._guard = BodyGuard(frame)
        self._guard.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool:
        assert self._guard is not None
        self._guard.remove()
        self._guard = None
        if kind is not None and not issubclass(kind, BodySkipped):
            self._forget()
            return False
        assert self._frame is not None
        # Only now: the name behind `as` was bound after `__enter__` had returned.
        self._names = names_of(self._frame)
        try:
            self._execute()
        except BaseException as raised:
            forget_skip(raised)
            raise
        finally:
            self._forget()
        return True

    def invoke(self, *inputs: Any, **kwargs: Any) -> Invoker:
        """Add one prompt with one block of its own; use it as `with tracer.invoke(prompt):`."""
        if not self._is_collecting:
            raise BlockError(
                explain(
                    "`tracer.invoke` was called where the model is already running, or outside of "
                    "its trace.",
                    why="Invokes are collected before the model runs.",
                    todo="Give `trace()` no input, and each `tracer.invoke(...)` its own.",
                )
            )
        return Invoker(self, inputs, kwargs)

    def _execute(self) -> None:
        assert self._block is not None
        assert self._names is not None
        assert self._saves is not None
        assert self._frame is not None
        if self._has_input:
            invocation = Invocation(
                self._inputs, self._kwargs, self._block, self._names, self._saves
            )
            error = self._run(self, [invocation])
            self._write(self._frame, self._names, [invocation], {})
        else:
            scope, invocations = self._collect()
            error = self._run(self, invocations)
            found = scope.own()
            own = {name: found[name] for name in self._block.binds() if name in found}
            self._write(self._frame, self._names, invocations, own)
        if error is not None:
            raise error

    def _collect(self) -> tuple[Scope, list[Invocation]]:
        """Run the trace's own body, which declares the invokes."""
        assert self._block is not None
        assert self._names is not None
        scope = self._names.scope()
        token = active_saves.set(self._saves)
        self._is_collecting = True
        try:
            exec(self._block.code(), scope)
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
        return scope, self._invocations

    def _write(
        self,
        frame: FrameType,
        names: Names,
        invocations: list[Invocation],
        own: dict[str, Any],
    ) -> None:
        """Write names into the user's frame: all into a block around it, else the saved ones."""
        assert self._saves is not None
        found = {
            name: value for name, value in own.items() if names.is_block or value in self._saves
        }
        for invocation in invocations:
            for name, value in invocation.bound.items():
                if names.is_block or invocation.is_saved or value in self._saves:
                    found[name] = value
        deliver(frame, found)

    def _forget(self) -> None:
        """Drop what would keep the model, the frame or the inputs alive."""
        self._frame = None
        self._names = None
        self._inputs = ()
        self._kwargs = {}
        self._invocations = []
        self._is_collecting = False


@final
class Invoker:
    """`with tracer.invoke(prompt):` - captures its body as one block."""

    __slots__ = ("_block", "_frame", "_guard", "_inputs", "_kwargs", "_tracer")

    def __init__(self, tracer: Tracer, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tracer = tracer
        self._inputs = inputs
        self._kwargs = kwargs
        self._guard: BodyGuard | None = None
        self._frame: FrameType | None = None
        self._block: Block | None = None

    def __enter__(self) -> Tracer:
        frame = sys._getframe(1)
        self._frame = frame
        self._block = block_at(frame)
        self._guard = BodyGuard(frame)
        self._guard.install()
        return self._tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool:
        assert self._guard is not None
        self._guard.remove()
        frame, self._frame = self._frame, None
        if kind is not None and not issubclass(kind, BodySkipped):
            return False
        assert frame is not None
        assert self._block is not None
        saves = self._tracer._saves
        assert saves is not None
        names = names_of(frame, SiblingNames(self._tracer._invocations))
        self._tracer._invocations.append(
            Invocation(self._inputs, self._kwargs, self._block, names, saves)
        )
        return True
