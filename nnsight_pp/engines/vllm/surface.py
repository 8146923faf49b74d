"""What a block on an engine may do beside reading and writing values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.envoys.cache_view import Cache
from nnsight_pp.errors import NotServedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Owners
    from nnsight_pp.envoys.tree_node import TreeNode
    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.worker import Worker


@final
class RankSurface:
    """One rank's part of it.

    Args:
        root: The tree that the blocks name their modules by.
        turns: Runs the workers.
        owners: Which stage computes a location.
        stage: This rank's.
        fail: Notes an error on the request of a worker.
    """

    def __init__(
        self,
        root: TreeNode,
        turns: Interleaver,
        owners: Owners,
        stage: int,
        fail: Callable[[Worker, Exception], None],
    ) -> None:
        self._root = root
        self._turns = turns
        self._owners = owners
        self._stage = stage
        self._fail = fail

    def cache(
        self, worker: Worker, modules: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Any:
        """Return what keeps the values of ``modules`` that are computed on this stage."""
        owned = self._owned if modules is None else self._owned_by_name
        cache = Cache(self._root, worker, modules, dict(options), owned)
        broken: list[Location] = []
        worker.note("cache")
        calls = [
            (location, self._of_request(worker, location, observe, broken))
            for location, observe in cache.observers()
        ]
        self._turns.observers.add(calls, worker)
        return cache.view()

    def _owned_by_name(self, location: Location) -> bool:
        return self._owners.owner_of(location) == self._stage

    def _owned(self, location: Location) -> bool:
        try:
            return self._owned_by_name(location)
        except NotServedError:
            return False  # the engine never calls it

    def _of_request(
        self,
        worker: Worker,
        location: Location,
        observe: Callable[[Any], None],
        broken: list[Location],
    ) -> Callable[[Any], None]:
        """Return what observes ``location`` in the steps in which the request runs it."""

        def look(value: Any) -> None:
            if broken or worker.cut is None or self._turns.skips.is_inside(worker, location):
                return
            if worker.error is not None and not self._is_before_end(worker, location):
                return
            try:
                if isinstance(value, Exception):
                    raise value
                observe(value)
            except Exception as error:  # it is the request's own: a wrong option, no memory
                broken.append(location)
                self._fail(worker, error)

        return look

    def _is_before_end(self, worker: Worker, location: Location) -> bool:
        """Whether the forward reaches ``location`` before what a stopped block last asked for.

        On its own stage a stop comes when the model is there; the others know it beforehand.
        """
        mark = worker.mark
        if self._turns.clock.now(worker, location) != mark.step:
            return False
        if self._stage != mark.stage:
            return self._stage < mark.stage
        position = self._owners.position_of(location)
        return None not in (position, mark.position) and position <= mark.position
