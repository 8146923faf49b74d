"""What a rank says of a finished request, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnsight_pp.core.protocols import Exchange


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands in a report for a value that another stage ships."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a block, in a form that crosses processes.

    Attributes:
        name: The class name.
        text: The message.
        pickled: The exception itself, or None where it cannot be pickled.
        frames: File, line and function of each of the user's frames, outermost first.
        stage: Where it was raised.
        failed_at: Where in the block's asks: the smallest is the first failure.
        is_echo: Whether it only repeats that another stage failed.
    """

    name: str
    text: str
    pickled: bytes | None
    frames: tuple[tuple[str, int, str], ...]
    stage: int
    failed_at: int
    is_echo: bool = False


@dataclass(frozen=True, slots=True)
class PullRecord:
    """What one line of a block has brought from one location of another stage, over all steps.

    Attributes:
        owner: The stage that it came from.
        location: What it was, as `core.location.Location` prints.
        filename: The block's file, or an empty text where the line is not known.
        line: The line that forced it.
        num_pulls: How often.
        bytes_received: The size of the answers.
        waited_s: How long this rank's forward thread stood still for them.
    """

    owner: int
    location: str
    filename: str
    line: int
    num_pulls: int
    bytes_received: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """One stage's account of one request.

    Attributes:
        request: The request's name on the ranks.
        stage: The reporting stage.
        trace: The client's name for the request.
        saved: The saved names, their remote leaves replaced by `Elsewhere`.
        grown: How the block changed objects from around it, likewise.
        failure: Why the block ended early, or None.
        warnings: Texts for the user.
        trail: How many asks the worker made, and a checksum of them: alike on every stage.
        kept: In a session: what else the block has bound (see `core.kept`).
        statistics: What the link moved for this request, by owner stage.
        results: The saved names that stand for the result of the request.
        is_witness: Whether another rank of the stage reports for it. Then it is here to be compared
            with that one, and holds `core.alike.Sampled` in place of tensors.
        homeward: On its rank: exchanges objects when its values are pickled.
    """

    request: str
    stage: int
    trace: str = ""
    saved: dict[str, Any] = field(default_factory=dict)
    grown: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    trail: tuple[int, int] | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    is_witness: bool = False
    homeward: Exchange | None = None
