"""What crossed between stages for one run, by the line of the user that needed it."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnsight_pp.core.report import PullRecord

_MOST_TEXT = 60


@dataclass(frozen=True, slots=True)
class PulledLine:
    """What one line of the user has brought from one stage to another, over all steps.

    Attributes:
        puller: The stage that needed it.
        owner: The stage that it came from.
        filename: The file of the line, or an empty text where the line is not known.
        line: Its number.
        locations: What came, as locations print, in the order of first use.
        pulls: How often.
        bytes: The size of what came.
        waited_ms: Milliseconds for which the puller's forward stood still.
    """

    puller: int
    owner: int
    filename: str
    line: int
    locations: tuple[str, ...]
    pulls: int
    bytes: int
    waited_ms: float

    @property
    def text(self) -> str:
        """The line itself, or an empty text."""
        return linecache.getline(self.filename, self.line).strip()


class PullTable(tuple[PulledLine, ...]):
    """The lines that pulled, by stage pair, file and line; prints as a table.

    A stage that runs a line which another stage has run too pulls for itself, so a line may be in
    it once for each stage pair.
    """

    __slots__ = ()

    @staticmethod
    def of(pulls: Iterable[tuple[int, PullRecord]]) -> PullTable:
        """Return the table of records, each with the stage that has pulled."""
        found: dict[tuple[int, int, str, int], PulledLine] = {}
        for puller, one in pulls:
            key = (puller, one.owner, one.filename, one.line)
            before = found.get(key) or PulledLine(*key, (), 0, 0, 0.0)
            is_new = one.location not in before.locations
            found[key] = replace(
                before,
                locations=before.locations + ((one.location,) if is_new else ()),
                pulls=before.pulls + one.num_pulls,
                bytes=before.bytes + one.bytes_received,
                waited_ms=before.waited_ms + 1000 * one.waited_s,
            )
        return PullTable(found[key] for key in sorted(found))

    @property
    def pairs(self) -> dict[tuple[int, int], tuple[int, int, float]]:
        """By puller and owner: pulls, bytes, and milliseconds waited, of all lines."""
        found: dict[tuple[int, int], tuple[int, int, float]] = {}
        for one in self:
            pulls, size, waited = found.get((one.puller, one.owner), (0, 0, 0.0))
            found[one.puller, one.owner] = (
                pulls + one.pulls,
                size + one.bytes,
                waited + one.waited_ms,
            )
        return found

    def __str__(self) -> str:
        if not self:
            return "nothing was pulled"
        lines = ["stages    pulls        bytes   ms waited  line"]
        for one in self:
            name = Path(one.filename).name if one.filename else "?"
            text = one.text
            shown = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
            lines.append(
                f"{one.puller} <- {one.owner}  {one.pulls:7,} {one.bytes:12,} "
                f"{one.waited_ms:11,.2f}  {name}:{one.line}  {shown}".rstrip()
            )
        return "\n".join(lines)

    __repr__ = __str__
