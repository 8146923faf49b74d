"""One ask that another stage answers, as its lazy value holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.location import Location, Visit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.interleave.asks import Asks
    from nnsight_pp.interleave.worker import Worker


@final
class RemoteAsk:
    """What a lazy value needs to bring its data: the ask, its owner, and its worker."""

    __slots__ = ("_asks", "_worker", "kind", "location", "number", "owner", "step")

    # Whether this rank has the value itself.
    is_here = False

    def __init__(
        self,
        asks: Asks,
        worker: Worker,
        number: int,
        owner: int,
        location: Location,
        step: int,
        kind: str = "value",
    ) -> None:
        self._asks = asks
        self._worker = worker
        self.number = number
        self.owner = owner
        self.location = location
        self.step = step
        # What is asked for: see `core.protocols.Link.pull`.
        self.kind = kind

    @property
    def visit(self) -> Visit:
        """What was asked for, in its printed form."""
        return Visit(self.location, self.step)

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """Return the owner's answer, with ``picks`` applied by the owner.

        Waits in place for an earlier stage or an earlier step; parks the worker for a later
        stage's value of this step.
        """
        return self._asks.pull(self._worker, self, picks, in_torch)

    def echo(self, error: Exception) -> None:
        """Note that ``error`` comes late: the owner raised it at the line that meant it."""
        if self._worker.is_current:
            self._worker.alone(error, is_echo=True)
