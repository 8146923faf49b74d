"""What a module takes and gives, as attributes of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_pp.core.location import Location
from nnsight_pp.envoys.operations import source_of
from nnsight_pp.interleave.worker import current_worker
from nnsight_pp.parallel.lazy import first_input, with_first_input
from nnsight_pp.trace.mount import savable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.envoys.operations import Source
    from nnsight_pp.envoys.tree_node import Forest
    from nnsight_pp.interleave.worker import Worker


class Values:
    """The part of an `Envoy` that asks the running worker for values."""

    if TYPE_CHECKING:
        _raised: AttributeError | None
        _forest: Forest

        @property
        def path(self) -> str: ...
        @property
        def root(self) -> Any: ...
        def nodes(self) -> Iterator[Any]: ...

    def _set_locations(self, path: str) -> None:
        self._input = Location(path, "input")
        self._output = Location(path, "output")
        # The answer of `_all_outputs`, and how often the forest had changed by then.
        self._gathered: tuple[int, dict[str, Location]] | None = None

    def _all_outputs(self) -> Mapping[str, Location]:
        """Return where this node and those below it give outputs, by path, in order of `nodes`."""
        known, num_changes = self._gathered, self._forest.num_changes
        if known is None or known[0] != num_changes:
            known = num_changes, {node._path: node._output for node in self.nodes()}
            self._gathered = known
        return known[1]

    def _worker(self, location: Location) -> Worker:
        worker = current_worker(location)
        if worker.turns is None or worker.turns is not self._forest.open_asks:
            self.root._check_worker(worker, location)
        return worker

    def _value(self, location: Location) -> Any:
        worker = current_worker(location)
        turns = worker.turns
        if turns is None or turns is not self._forest.open_asks:
            self.root._check_worker(worker, location)
        assert turns is not None
        value = turns.read(worker, location)
        return value if type(value) is torch.Tensor else savable(value)

    def _read(self, location: Location) -> Any:
        """Return a value, for the getter of a property."""
        try:
            return self._value(location)
        except AttributeError as error:
            self._raised = error
            raise

    def _write(self, location: Location, value: Any) -> None:
        worker = self._worker(location)
        assert worker.turns is not None
        worker.turns.write(worker, location, value)

    def _offer(self, location: Location, value: Any) -> Any:
        """Serve ``value`` where a run is on; return what it goes on as."""
        serve = self.root._gate_of_sources().serve
        return value if serve is None else serve(location, value)

    @property
    def output(self) -> Any:
        """What the module's forward returns at this step."""
        return self._read(self._output)

    @output.setter
    def output(self, value: Any) -> None:
        self._write(self._output, value)

    @property
    def inputs(self) -> Any:
        """What the module is called with: ``(args, kwargs)``."""
        return self._read(self._input)

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self._write(self._input, value)

    @property
    def input(self) -> Any:
        """The first positional argument of the module, else the first named one."""
        return first_input(self._read(self._input))

    @input.setter
    def input(self, value: Any) -> None:
        self._write(self._input, with_first_input(self._value(self._input), value))

    def skip(self, value: Any) -> None:
        """Do not run the module's forward at this step: ``value`` is its output.

        ``value`` may be computed from the module's own input. In a batch of several prompts in
        this process every block must skip it, each for its own rows. On an engine the module runs
        for the other requests, and ``value`` replaces the rows of this one: what the run leaves
        in the cache of an attention inside stays there.
        """
        location = Location(self.path, "skip")
        self.root._will_skip(location)
        self._write(location, value)

    @property
    def source(self) -> Source:
        """The calls and assignments inside the module's forward. Touch it before the trace."""
        return source_of(cast("Envoy", self))
