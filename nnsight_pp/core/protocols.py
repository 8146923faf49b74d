"""The seams: what an interleaver is handed by an engine.

`interleave`, `parallel` and `wire` do not know each other. An engine builds one of each of these
and hands them to the `Interleaver` in one visible constructor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nnsight_pp.core.ask import AskKey
    from nnsight_pp.core.location import Location


class RemoteValue:
    """Base of what stands for another stage's value in a block.

    Declared here so that reports can tell a value that another rank ships from one that this
    rank ships, without knowing how lazy values work.
    """

    __slots__ = ()

    def _real_value(self) -> Any:  # any served value
        """Return the value itself, pulling it when it is not here yet."""
        raise NotImplementedError

    def _is(self, other: Any) -> bool:  # any object of the block
        """Whether the value itself is ``other``, another object than this, or what that has."""
        return False

    def _is_of_this_rank(self) -> bool:
        """Whether this rank is the one that has the value, and ships it."""
        return False


class DeferredError(Exception):
    """The owner cannot run a call yet: its worker is parked on another stage's value."""


class Pending(Protocol):
    """An answer that is on its way."""

    @property
    def waited_s(self) -> float:
        """How long `wait` has stood still."""
        ...

    @property
    def bytes_received(self) -> int:
        """The size of the answer, 0 before it is here."""
        ...

    def wait(self) -> Any:  # any served value
        """Return the value.

        Blocks the thread, never longer than the link's bound.

        Raises:
            OutOfOrderError: The owner closed the step without serving the value.
            ValueUnavailableError: The owner cannot send it, or its worker raised.
            RankDivergenceError: The owner's worker asked for something else under this number.
            PullTimeoutError: The bound ran out.
            DeferredError: A call that the owner could not run yet.
        """
        ...


class Link(Protocol):
    """Publish what this rank answered; pull what another stage answered."""

    @property
    def sums_alike(self) -> bool:
        """Whether published values lie on the device that workers compute on.

        A sum of one then has the bits of a worker's own sum.
        """
        ...

    @property
    def casts_copy(self) -> bool:
        """Whether the model's values have more than two bytes a number.

        A cast to two bytes is then a copy, and else the value itself.
        """
        ...

    def publish(self, key: AskKey, location: Location, value: Any) -> None:
        """Make the answered ask ``key`` available. ``value`` is kept, so hand over a copy."""
        ...

    def close(self, request: str, step: int) -> None:
        """Say that no ask of ``request`` up to ``step`` will be served here any more."""
        ...

    def fail(self, request: str, text: str, *, is_stop: bool = False) -> None:
        """Say that the worker of ``request`` raised, and will answer nothing more.

        Where it has stopped its request, the other stages' workers do so themselves.
        """
        ...

    def pull(
        self,
        key: AskKey,
        owner: int,
        location: Location,
        step: int,
        picks: Sequence[Any],
        kind: str = "value",
        *,
        at_once: bool = False,
    ) -> Pending:
        """Ask stage ``owner`` for its answer to ``key``; return before it comes.

        ``kind`` says what is asked for: "value", a value of the model; "call", the result of a
        call, which may be deferred; "last call", the same when the request is over, which waits;
        "constant", which needs no answer of a worker. ``at_once`` says that the caller will wait
        for nothing else: the question need not be sent together with later ones.
        """
        ...

    def let_go(self, request: str, owner: int, asks: Sequence[tuple[int, int | None]]) -> None:
        """Say that this rank will not pull these asks of ``request`` from stage ``owner`` any more.

        Args:
            request: Their request.
            owner: Who answers them.
            asks: Their numbers, each with its step; None for a call, which may be answered later.
        """
        ...

    def release(self, request: str) -> None:
        """Say that this rank needs nothing more of ``request`` and answers nothing new."""
        ...


class Owners(Protocol):
    """Which stage computes a location."""

    def owner_of(self, location: Location) -> int | None:
        """Return the stage, or None for a location that every rank serves itself.

        Raises:
            UnknownLocationError: No module of the model has this path.
            NotServedError: The engine never computes this location.
        """
        ...

    def holder_of(self, path: str) -> int:
        """Return the stage that holds the module at ``path`` and can call it.

        Raises:
            UnknownLocationError: No module of the model has this path.
        """
        ...

    def position_of(self, location: Location) -> int | None:
        """Return the place of ``location`` in its stage's forward, or None where it has none."""
        ...


class RankGroup(Protocol):
    """The ranks that split each layer of a stage among them. Each method is a collective."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def device(self) -> Any:  # torch.device, without importing torch here
        """Where tensors must be."""
        ...

    def gather(self, tensor: Any) -> list[Any]:
        """Return every rank's ``tensor``, by rank. All have one shape and dtype."""
        ...

    def total(self, tensor: Any) -> Any:
        """Return the sum of every rank's ``tensor``, in new memory."""
        ...


class JoinedValue(Protocol):
    """A value as blocks see it, and the way back to this rank's part.

    Attributes:
        given: What is still to be compared of it, for `Joiner.first_difference`.
    """

    given: Sequence[Any]

    def are_alike(self) -> None:
        """Note that the ranks have compared `given`."""
        ...

    @property
    def value(self) -> Any:  # any served value
        """What blocks see."""
        ...

    @property
    def refused(self) -> str:
        """Why no block may see it, or an empty text."""
        ...

    def error(self) -> Exception:
        """Return the error for a value that no block may see."""
        ...

    def cut_of(self, cut: Cut, where: Callable[[], Any]) -> Cut:
        """Return ``cut`` for one visit, or one that refuses what blocks may not see or write.

        Args:
            cut: How a worker sees values.
            where: Returns the line of its block, for a message.
        """
        ...

    def written(self, cut: Cut, value: Any) -> Any:
        """Return what went through ``cut`` into ``value``; None where that is surely nothing.

        Args:
            cut: What `cut_of` gave for this visit.
            value: What the model goes on with.
        """
        ...

    def split(self, value: Any) -> Any:
        """Return what this rank's model goes on with, when blocks have left ``value``."""
        ...


class Joiner(Protocol):
    """Makes values whole over the ranks that split each layer. Each method is a collective.

    Attributes:
        num_compared: How many tensors `first_difference` tells from each other.
    """

    num_compared: int

    def join(self, location: Location, value: Any, *, may_wait: bool = False) -> JoinedValue:
        """Return the whole of this rank's ``value``.

        With ``may_wait`` some of it may be left to be compared later.
        """
        ...

    def first_difference(
        self, facts: Sequence[float], value: Any, given: Sequence[Any] = ()
    ) -> int | None:
        """Return which of the facts differs between the ranks, or None.

        One number more than there are facts means ``value``, up to rounding, or ``given``.
        """
        ...

    def of_all(self, number: int) -> list[int]:
        """Return the ``number`` of every rank, by rank."""
        ...


class Cut(Protocol):
    """How one request's worker sees a value that the model computes for a whole batch."""

    def give(self, value: Any) -> Any:
        """Return what the worker is given of ``value``."""
        ...

    def marks(self, served: Any) -> Any:
        """Return a record of ``served`` from which `put` can tell later edits."""
        ...

    def check(self, value: Any, assigned: Any) -> None:
        """Raise `RowsError` where ``assigned`` cannot replace this request's share of ``value``."""
        ...

    def put(self, value: Any, served: Any, marks: Any, *, assigned: bool) -> Any:
        """Return the value that the model continues with, the worker's edits in it."""
        ...


class Surface(Protocol):
    """What a model of this process offers to its blocks beside its values."""

    def cache(self, worker: Any, modules: Sequence[Any] | None, options: Mapping[str, Any]) -> Any:
        """Return what keeps the values of ``modules``, all by default, as ``worker`` sees them."""
        ...


class Switch(Protocol):
    """Exchange of the thread-local state around every greenlet switch."""

    @property
    def may_park_in_torch(self) -> bool:
        """Whether a worker may park inside a torch call."""
        ...

    @property
    def new_slot(self) -> Callable[[bool], Any]:
        """Make a place for one worker's thread-local state: ``new_slot(grad_enabled)``."""
        ...

    @property
    def switch(self) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
        """Switch to a worker, until it parks or ends: ``switch(slot, greenlet, args)``."""
        ...

    @property
    def throw(self) -> Callable[[Any, Any, BaseException], Any]:
        """Raise where a worker is parked; come back likewise: ``throw(slot, greenlet, error)``."""
        ...


class Exchange(Protocol):
    """Says what goes in place of an object inside of what is pickled as it is."""

    is_deep: bool

    def instead_of(self, obj: Any) -> Any:
        """Return what goes in place of ``obj``, or None."""
