"""Which stage computes a location.

A stage holds placeholders for the modules of other stages, so at load the ranks exchange which
modules are real where, and which of them ran in a trial forward. From these two facts every rank
derives the same map:

* real on one stage: that stage;
* real on several, ran on one: that one (tied embeddings are real on the first and the last stage
  and run on the first);
* real on several, ran on several: a part of the model that spans stages; its inputs belong to the
  first of them and its output to the last;
* real on several, ran on none: used after the forward (heads, logits processors): the last.

A path that is real nowhere goes with its longest known ancestor.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, NamedTuple, final

from nnsight_pp.core.location import LOGITS, RESULT, SAMPLES, Location
from nnsight_pp.errors import NotServedError, UnknownLocationError, explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# The place of what comes after the forward; no stage has that many locations in it.
_AFTER_FORWARD = 1 << 29


class Span(NamedTuple):
    """The stages on which a module's inputs and its output are served."""

    first: int
    last: int


@final
class StageMap:
    """The owner of every location, the same on every rank.

    Args:
        real: For each stage, the paths of the modules that are real there.
        ran: For each stage, the paths of the modules that ran in a trial forward.
        silent: Paths that never run as a module call, with the reason and what to read instead.
        known: Every path of the whole tree.
        order: The locations of each stage in the order in which a forward serves them, as far as
            known. With it an ask against the order is refused at once, on every stage alike; a
            location that a forward meets twice must be left out.
    """

    def __init__(
        self,
        real: Sequence[Iterable[str]],
        ran: Sequence[Iterable[str]],
        known: Iterable[str],
        silent: Mapping[str, str] | None = None,
        order: Sequence[Sequence[Location]] = (),
    ) -> None:
        self._last_stage = len(real) - 1
        self._silent = dict(silent or {})
        self._spans: dict[str, Span] = {}
        # Twice their number: a skip, which is asked for at a module's input, is over between the
        # last location inside and the output.
        self._positions = {
            location: 2 * position
            for locations in order
            for position, location in enumerate(locations)
        }
        for position, location in enumerate((LOGITS, SAMPLES)):
            self._positions[location] = _AFTER_FORWARD + position
        ran_sets = [set(paths) for paths in ran]
        where_real: dict[str, list[int]] = {}
        for stage, paths in enumerate(real):
            for path in paths:
                where_real.setdefault(path, []).append(stage)
        for path, stages in where_real.items():
            fired = [stage for stage in stages if path in ran_sets[stage]]
            if len(stages) == 1:
                self._spans[path] = Span(stages[0], stages[0])
            elif fired:
                self._spans[path] = Span(fired[0], fired[-1])
            else:
                self._spans[path] = Span(stages[-1], stages[-1])
        for path in known:
            if path not in self._spans:
                self._spans[path] = self._of_ancestor(path)
        # What was found, by location.
        self._owners: dict[Location, int | None] = {RESULT: None}

    def _of_ancestor(self, path: str) -> Span:
        while path:
            path = path.rpartition(".")[0]
            if path in self._spans:
                return self._spans[path]
        return Span(0, self._last_stage)

    def owner_of(self, location: Location) -> int | None:
        """Return the stage that serves ``location``; None for what every rank serves itself.

        Raises:
            UnknownLocationError: No module has this path.
            NotServedError: The module is never called.
        """
        found = self._owners
        if location in found:
            return found[location]
        found[location] = owner = self._owner_of(location)
        return owner

    def _owner_of(self, location: Location) -> int:
        if location in (LOGITS, SAMPLES):
            return self._last_stage
        span = self._spans.get(location.path)
        if span is None:
            raise self._unknown(location)
        if location.path in self._silent:
            raise NotServedError(
                explain(
                    f"{location} is never computed as a module call by this engine.",
                    why=self._silent[location.path],
                    todo="Read one of the places named instead.",
                )
            )
        return span.first if location.kind == "input" else span.last

    def position_of(self, location: Location) -> int | None:
        """Return the place of ``location`` in its stage's order, or None where it is not known."""
        if location.kind == "skip":
            behind = self._positions.get(location._replace(kind="output"))
            return None if behind is None else behind - 1
        return self._positions.get(location)

    def holder_of(self, path: str) -> int:
        """Return the stage that holds the module at ``path`` and can call it.

        Raises:
            UnknownLocationError: No module has this path.
        """
        span = self._spans.get(path)
        if span is None:
            raise self._unknown(Location(path, "call"))
        return span.last

    def span_of(self, path: str) -> Span | None:
        """Return the stages of the module at ``path``."""
        return self._spans.get(path)

    def paths(self) -> list[str]:
        """Return every known path."""
        return list(self._spans)

    def _unknown(self, location: Location) -> UnknownLocationError:
        near = difflib.get_close_matches(location.path, self._spans, n=3)
        return UnknownLocationError(
            explain(
                f"This model has no module {location.path!r}.",
                why=f"Near matches: {', '.join(near)}." if near else "",
                todo="`print(model)` shows every path.",
            )
        )
