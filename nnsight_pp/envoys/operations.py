"""`.source`: the calls and assignments inside a forward, as places in the tree.

`model.mlp.source` rewrites the module's forward, once; `model.mlp.source.relu_0.output` is then a
value like any other. An operation has a `.source` of its own, which looks into the Python function
that it calls: which one that is shows only when it is called, so this is asked for in a block, and
waits for the call.

A module runs rewritten only in calls that begin after the first touch. What it ran before that in
the same run was not counted; an ask that would miss it, or take a later call for it, is refused.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.location import Location, Visit
from nnsight_pp.envoys.serve_point import ServePoint
from nnsight_pp.envoys.source_calls import operation_path
from nnsight_pp.envoys.source_peel import Body, body_of
from nnsight_pp.envoys.source_print import marked, with_gutter
from nnsight_pp.envoys.source_text import not_available
from nnsight_pp.errors import UnknownLocationError, explain
from nnsight_pp.interleave.unwind import out_of_order
from nnsight_pp.interleave.worker import running_worker
from nnsight_pp.parallel.lazy import first_input, with_first_input

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.envoys.source_rewrite import Rewritten
    from nnsight_pp.interleave.worker import Worker


def source_of(node: Envoy) -> Source:
    """Return the operations of the module of ``node``, whose forward is rewritten from now on.

    Raises:
        SourceNotAvailable: The forward is not made of readable Python.
    """
    node.root._gate_of_sources()
    point = vars(node._module).get("forward")
    if not isinstance(point, ServePoint):
        raise not_available(
            f"{node.path}.source was asked for.",
            "The `forward` of this module was replaced after the model was wrapped.",
            "Replace it first, and wrap the model then.",
        )
    if point.body is None:
        point.body = body_of(point.__wrapped__, node._module)
    return Source(node, node.path, point.body)


@final
class Source:
    """The operations of one function: its calls and assignments, by name.

    Printing it shows the function's text with the names beside it.
    """

    __slots__ = ("_body", "_node", "_path")

    def __init__(self, node: Envoy, path: str, body: Body) -> None:
        self._node = node
        self._path = path
        self._body = body

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operations, in the order of execution."""
        return self._body.rewritten.names

    @property
    def compiled(self) -> Rewritten:
        """The rewritten function."""
        return self._body.rewritten

    def __getattr__(self, name: str) -> SourceEnvoy:
        if name in Source.__slots__:  # of a copy that is being made
            raise AttributeError(name)
        number = self._body.rewritten.numbers.get(name)
        if number is None:
            near = difflib.get_close_matches(name, self.names, n=3)
            raise UnknownLocationError(
                explain(
                    f"{self._path}.source has no operation {name!r}.",
                    why=f"available: {', '.join(self.names)}.",
                    todo=f"Near matches: {', '.join(near)}." if near else "",
                )
            )
        return SourceEnvoy(self, name, number)

    def __iter__(self) -> Iterator[SourceEnvoy]:
        return (SourceEnvoy(self, name, number) for number, name in enumerate(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._body.rewritten.numbers

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.names})

    def __repr__(self) -> str:
        return with_gutter(self._body.rewritten)

    def _check(self, worker: Worker, location: Location) -> None:
        """Raise `OutOfOrderError` where calls that were not rewritten make the ask mean another.

        ``<path>.source`` is counted once for each rewritten call, ``<path>.input`` for every call.
        """
        path, turns = self._path, worker.turns
        gate = self._node.root._gate_of_sources()
        if turns is None or path != self._node.path:  # a drill is bound to its own call
            return
        clock = turns.clock
        begun = clock.now(worker, Location(path, "input"))
        offered = clock.now(worker, Location(path, "source"))
        is_running = begun > clock.now(worker, Location(path, "output"))
        misses_this = is_running and path not in gate.open
        if misses_this or (begun != offered and not worker.is_relaxed):
            raise out_of_order(
                worker,
                Visit(location, worker.step),
                "",
                f"{path} ran before its `.source` was touched for the first time, and its "
                "operations are values only in calls that begin later: touch it before the trace.",
            )


@final
class SourceEnvoy:
    """One call or assignment inside a function.

    Attributes:
        name: As it is listed by the function's `Source`.
    """

    __slots__ = ("_number", "_path", "_source", "name")

    def __init__(self, source: Source, name: str, number: int) -> None:
        self.name = name
        self._source = source
        self._number = number
        self._path = operation_path(source._path, name)

    @property
    def path(self) -> str:
        """The path of this operation, from ``model``."""
        return self._path

    @property
    def _is_call(self) -> bool:
        return self._source._body.rewritten.operations[self._number].is_call

    def _at(self, kind: str) -> Location:
        """Return one of the operation's locations, for an ask that is made now."""
        location = Location(self._path, kind if self._is_call else "output")
        worker = running_worker()
        if worker is not None:
            self._source._check(worker, location)
        return location

    @property
    def output(self) -> Any:
        """What the call returns, or what is assigned."""
        return self._source._node._value(self._at("output"))

    @output.setter
    def output(self, value: Any) -> None:
        self._source._node._write(self._at("output"), value)

    @property
    def inputs(self) -> Any:
        """What is called with: ``(args, kwargs)``."""
        value = self._source._node._value(self._at("input"))
        return value if self._is_call else ((value,), {})

    @inputs.setter
    def inputs(self, value: Any) -> None:
        given = value if self._is_call else first_input(value)
        self._source._node._write(self._at("input"), given)

    @property
    def input(self) -> Any:
        """The first positional argument, else the first named one."""
        return first_input(self.inputs)

    @input.setter
    def input(self, value: Any) -> None:
        self.inputs = with_first_input(self.inputs, value) if self._is_call else ((value,), {})

    def skip(self, value: Any) -> None:
        """Do not make the call: ``value`` is its output. An assignment stores ``value``."""
        if not self._is_call:
            self.output = value
            return
        location = self._at("skip")
        self._source._node.root._will_skip(location)
        self._source._node._write(location, value)

    @property
    def source(self) -> Source:
        """The operations of the Python function that this call runs. Waits for the call.

        Raises:
            SourceNotAvailable: It is no call of a Python function, or no block is running.
        """
        if not self._is_call:
            raise not_available(
                f"{self._path} is an assignment.",
                "Only a call has operations inside it.",
                "Read its `.output`.",
            )
        if running_worker() is None:
            raise not_available(
                f"{self._path}.source was asked for outside of a trace.",
                "Which function a call runs is known only when it is called.",
                "Ask for it inside a trace.",
            )
        return self._inside()

    def _inside(self) -> Source:
        node, into = self._source._node, self._at("input")
        worker = node._worker(into)
        gate = node.root._gate_of_sources()
        running = gate.open.get(self._path)
        if running is not None and self._is_meant(worker, into):
            return Source(node, self._path, running.body)
        node._value(into)
        calls = gate.open.get(self._source._path)
        if calls is None or calls.number != self._number or calls.called is None:
            assert worker.turns is not None
            raise worker.turns.too_late(worker, into, worker.step)
        if calls.inside is None:
            calls.inside = body_of(calls.called)
        return Source(node, self._path, calls.inside)

    def _is_meant(self, worker: Worker, into: Location) -> bool:
        """Whether an ask made now means the call that is running."""
        assert worker.turns is not None
        clock = worker.turns.clock
        running = clock.now(worker, into) - 1
        if not worker.is_relaxed and clock.target(worker, into) != running:
            return False
        # As after any served ask of a loop: what follows means the visits of this call.
        worker.is_relaxed = worker.is_relaxed or (worker.loop_depth > 0 and running > 0)
        return True

    def __repr__(self) -> str:
        return marked(self._path, self._source._body.rewritten, self._number)
