"""What a worker parks on.

Every rank runs the same block, so every rank's worker for a request makes the same asks in the
same order. A worker counts them from 0, and an `AskKey` is the same name on every rank for the
same thing in the user's program. It is the only name that crosses between stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.lens import Seen
    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Pending


# Sorts behind every stage and every step: the result of a request, and what comes after it.
BEHIND_ALL = 1 << 30


class AskKey(NamedTuple):
    """Names one ask of one request, alike on every rank."""

    request: str
    number: int


@dataclass(slots=True)
class Read:
    """Parked until a visit of ``location``; answered with its value."""

    number: int
    location: Location
    visit: int
    # Set where the value stands inside the one of another location.
    seen: Seen | None = None

    @property
    def place(self) -> Location:
        """Where the worker is parked."""
        return self.location if self.seen is None else self.seen.place

    def __str__(self) -> str:
        return f"Read {self.location}#{self.visit}"


@dataclass(slots=True)
class Write:
    """Parked until a visit of ``location``, which ``value`` then replaces."""

    number: int
    location: Location
    visit: int
    value: Any  # whatever the block assigned
    seen: Seen | None = None

    @property
    def place(self) -> Location:
        """Where the worker is parked."""
        return self.location if self.seen is None else self.seen.place

    def __str__(self) -> str:
        return f"Write {self.location}#{self.visit}"


class Moment(NamedTuple):
    """How far a run has come: a step, a stage, and a location's place in that stage's forward."""

    step: int
    stage: int
    position: int


@dataclass(slots=True)
class Turn:
    """Parked until the blocks that share names with this one have come to another stage's value."""

    number: int
    location: Location
    visit: int
    moment: Moment

    def __str__(self) -> str:
        return f"Turn {self.location}#{self.visit}"


@dataclass(slots=True)
class Step:
    """Parked on the step gate: until this rank has opened ``step`` for the request."""

    step: int

    def __str__(self) -> str:
        return f"Step {self.step}"


@dataclass(slots=True)
class Pull:
    """Parked on the value of a later stage; picked up at the next pipeline-safe point."""

    location: Location
    step: int
    # None when the owner could not run a call yet: it is asked again at the next safe point.
    pending: Pending | None
    again: Callable[[bool], Pending]

    def __str__(self) -> str:
        return f"Pull {self.location}#{self.step}"


@dataclass(slots=True)
class Join:
    """Parked until as many blocks as were announced have come to the same barrier."""

    barrier: object

    def __str__(self) -> str:
        return f"Join {self.barrier}"


Ask = Read | Write | Turn | Step | Pull | Join
