"""Values over a tensor-parallel group: joined when a block asks, split when the model goes on.

A location without a rule must hold the same on every rank: it is compared before a block sees it,
by sums of its elements, and refused where the ranks differ. So what no rule knows is never taken
for the whole.

Every method that talks to the group is a collective: each rank of the group calls it for the same
location, in the same order. That this holds is what `interleave.agreement` makes sure of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.rows import TokenCut, overlaps_itself
from nnsight_pp.core.tree import leaves, map_leaves
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.parallel.parts import (
    Columns,
    PartShapeError,
    Rule,
    Summand,
    join,
    share,
    summand,
)
from nnsight_pp.parallel.sums import NUM_SUMS, Sums, agree_at, sums_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut, RankGroup
    from nnsight_pp.errors import Where

# Tensors of one value that are compared one by one in a message of fixed size.
_SLOTS = 32
# The same for values that were handed to blocks, and how many numbers say how many there are.
_GIVEN_SLOTS = 4
_COUNTS = 2
NUM_FACTS = 8
VALUES = NUM_FACTS


@final
class Joined:
    """One visit of a location: the whole value, and the way back to this rank's part.

    Attributes:
        value: What blocks see.
        refused: Why no block may see it, or an empty text.
        given: The sums of a value without a rule, which are still to be compared with those of the
            other ranks: along with what the first block has done. Empty once they were alike.
    """

    __slots__ = (
        "_befores",
        "_live",
        "_location",
        "_may_wait",
        "_parts",
        "_rules",
        "_wholes",
        "given",
        "refused",
        "value",
    )

    def __init__(
        self, parts: Parts, location: Location, value: Any, *, may_wait: bool = False
    ) -> None:
        self._parts = parts
        self._may_wait = may_wait
        self.given: Sequence[Sums] = ()
        self._location = location
        self._rules = parts.rules_of(location)
        self._live = value
        self._wholes: list[tuple[Any, int]] = []
        # Of each summed tensor: a copy, to tell which rows were changed.
        self._befores: dict[int, torch.Tensor] = {}
        self.value = value
        self.refused = ""
        try:
            self._join()
        except PartShapeError as error:
            self.refused = str(error)

    def _join(self) -> None:
        tensors = list(leaves(self._live))
        ruled = self._rules if len(self._rules) == len(tensors) else [None] * len(tensors)
        plain = [
            leaf
            for leaf, rule in zip(tensors, ruled, strict=True)
            if rule is None and isinstance(leaf, torch.Tensor)
        ]
        if plain and self._may_wait and self._parts.was_alike(self._location, len(plain)):
            self.given = [Sums.of(one) for one in plain]
        elif plain and not self._parts.is_same(plain, self._location):
            self.refused = "the ranks hold different values, and no rule says how they make one"
            return
        if not any(ruled):
            return
        with torch.inference_mode(False), torch.no_grad():
            wholes = [self._whole(leaf, rule) for leaf, rule in zip(tensors, ruled, strict=True)]
        rest = iter(wholes)
        self.value = map_leaves(self._live, lambda _: next(rest))
        self._wholes = [
            (leaf, leaf._version if rule is not None else 0)
            for leaf, rule in zip(wholes, ruled, strict=True)
        ]
        self._rules = ruled

    def _whole(self, leaf: Any, rule: Rule | None) -> Any:
        whole = self._parts.of_rule(rule, leaf) if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(rule, Summand):
            self._befores[id(whole)] = whole.clone()
        return whole

    def error(self, where: Where | None = None) -> NotSupportedError:
        """Return the error for a value of which this rank has a piece that is not made whole."""
        return NotSupportedError(
            explain(
                f"{self._location} cannot be made whole over the tensor-parallel ranks.",
                where=where,
                why=f"{self.refused[:1].upper()}{self.refused[1:]}.",
                todo="Take the output of the layer that computes it, or of the module around it.",
            )
        )

    def cut_of(self, cut: Cut, where: Callable[[], Where | None]) -> Cut:
        """Return a cut of this visit, or one that refuses a value that is not whole.

        It refuses ids that no rank has, too.
        """
        if self.refused:
            return _RefusingCut(lambda: self.error(where()))
        if not isinstance(cut, TokenCut):
            return cut
        return cut.for_visit(self._parts.num_ids(self._location))

    def written(self, cut: Cut, value: Any) -> Any:
        """Return what went through ``cut`` into ``value``; None where that is surely nothing.

        A value without edits is what the ranks have joined or compared before.
        """
        return None if isinstance(cut, TokenCut) and not cut.has_put else cut.give(value)

    def are_alike(self) -> None:
        """Note that the ranks have compared `given`."""
        self.given = ()

    def split(self, value: Any) -> Any:
        """Return what this rank's model goes on with, when blocks have left ``value``."""
        if self.given:  # whoever was handed it is apart
            self._parts.doubt(self._location)
        if not self._wholes:
            return value
        if value is self.value and not self._is_edited():
            return self._live
        rest = iter(zip(leaves(self._live), self._wholes, self._rules, strict=True))
        return map_leaves(value, lambda leaf: self._part(leaf, *next(rest)))

    def _is_edited(self) -> bool:
        """Whether a whole tensor was edited in place since it was joined."""
        return any(
            rule is not None and leaf._version != version
            for (leaf, version), rule in zip(self._wholes, self._rules, strict=True)
        )

    def _part(self, leaf: Any, live: Any, known: tuple[Any, int], rule: Rule | None) -> Any:
        if rule is None or not isinstance(live, torch.Tensor):
            return leaf
        whole, version = known
        if leaf is whole and leaf._version == version:
            return live
        with torch.inference_mode(live.is_inference()), torch.no_grad():
            part = self._parts.part(rule, leaf, live, self._befores.get(id(whole)))
            if leaf is not whole or overlaps_itself(live):
                return part
            # An edit in place also lands where the live tensor is shared.
            return live.copy_(part)


@final
class _RefusingCut:
    """Refuses a value that no block may see."""

    __slots__ = ("_error",)

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def give(self, value: Any) -> Any:
        """Refuse."""
        self.check(value, None)

    def check(self, value: Any, assigned: Any) -> None:
        """Refuse."""
        raise self._error()

    def marks(self, served: Any) -> Any:
        """Nothing was given."""

    def put(self, value: Any, served: Any, marks: Any, *, assigned: bool) -> Any:
        """Return ``value``: nothing was given."""
        return value


@final
class Parts:
    """The values of one rank's model, whole for blocks.

    Args:
        group: The ranks that split each layer.
        rules: Of each location that holds parts: the rule of each leaf, None for a whole one.
        num_ids: Of the input of each embedding whose rows are split: how many ids there are. No
            rank fails on an id that none of them has.
    """

    num_compared = _SLOTS

    def __init__(
        self,
        group: RankGroup,
        rules: Mapping[Location, Sequence[Rule | None]],
        num_ids: Mapping[Location, int] | None = None,
    ) -> None:
        self._group = group
        self._rules = rules
        self._num_ids = num_ids or {}
        # Locations without a rule at which all ranks held the same when they compared it last.
        self._alike: set[Location] = set()

    def rules_of(self, location: Location) -> Sequence[Rule | None]:
        """Return the rule of each leaf at ``location``; empty where no rule is known."""
        if location.kind == "skipped":
            location = location._replace(kind="output")
        return self._rules.get(location, ())

    def num_ids(self, location: Location) -> int | None:
        """Return how many ids there are, where ``location`` holds ids that ranks share out."""
        return self._num_ids.get(location)

    def join(self, location: Location, value: Any, *, may_wait: bool = False) -> Joined:
        """Return the whole of ``value``. A collective; untouched locations never come here.

        Args:
            location: Where it stands.
            value: What this rank has of it.
            may_wait: Whether what has no rule may be compared with what blocks have done: a
                location that was found alike before. See `Joined.given`.

        Cost: one gather of each part, or one comparison of a value without rules.
        """
        return Joined(self, location, value, may_wait=may_wait)

    def was_alike(self, location: Location, num_tensors: int) -> bool:
        """Whether the ranks held the same there, and so many tensors go along in a message."""
        return location in self._alike and num_tensors <= _GIVEN_SLOTS

    def doubt(self, location: Location) -> None:
        """Note that the ranks may hold different values there."""
        self._alike.discard(location)

    def arguments(self, location: Location, value: Any) -> Any:
        """Return what a module takes on this rank, when a block calls it with whole values.

        Raises:
            PartShapeError: They are not the values that the module takes.
        """
        rules = self._rules_for(location, value)
        return map_leaves(
            value,
            lambda leaf: (
                share(rule, leaf, self._group.rank, self._group.size)
                if isinstance(rule := next(rules), Columns)
                else leaf
            ),
        )

    def result(self, location: Location, value: Any) -> Any:
        """Return the whole of what a module that a block called gave on this rank. A collective."""
        rules = self._rules_for(location, value)
        return map_leaves(value, lambda leaf: self.of_rule(next(rules), leaf))

    def of_rule(self, rule: Rule | None, leaf: Any) -> Any:
        """Return the whole of ``leaf``, which is what ``rule`` says. A collective, if it is one."""
        if rule is None:
            return leaf
        return self.whole(rule, leaf) if isinstance(rule, Columns) else self._group.total(leaf)

    def _rules_for(self, location: Location, value: Any) -> Iterator[Rule | None]:
        rules = self.rules_of(location)
        number = len(list(leaves(value)))
        if rules and len(rules) != number:
            raise PartShapeError(f"{location} holds {len(rules)} values here, not {number}")
        return iter(rules or [None] * number)

    def whole(self, rule: Columns, part: torch.Tensor) -> torch.Tensor:
        """Return the whole of which ``part`` is this rank's share. A collective.

        Raises:
            PartShapeError: ``part`` is not what the rule says; on every rank, before data moves.
        """
        rule.sizes_in(part, self._group.size)
        return join(rule, self._group.gather(part))

    def part(
        self, rule: Rule, whole: torch.Tensor, live: torch.Tensor, before: torch.Tensor | None
    ) -> torch.Tensor:
        """Return this rank's part of ``whole``, for a live part that was joined to ``before``."""
        rank, size = self._group.rank, self._group.size
        if isinstance(rule, Columns):
            return share(rule, whole, rank, size)
        assert before is not None
        return summand(live, before, whole, is_first=rank == 0)

    def is_same(self, tensors: Sequence[torch.Tensor], location: Location) -> bool:
        """Whether every rank holds the same ``tensors`` at ``location``. A collective."""
        parts = self._group.gather(torch.cat([sums_of(tensor) for tensor in tensors]))
        is_same = _are_equal(parts)
        if not is_same:
            rows = _on_host(parts)
            is_same = all(agree_at(rows, place, one.dtype) for place, one in enumerate(tensors))
        (self._alike.add if is_same else self._alike.discard)(location)
        return is_same

    def first_difference(
        self, facts: Sequence[float], value: Any, given: Sequence[Sums] = ()
    ) -> int | None:
        """Return which of ``facts`` differs between the ranks, `VALUES` for the rest, or None.

        The rest are ``value``, and what `Joined.given` has kept.

        A collective whose message has the same size whatever is compared: ranks that come to it
        from different places meet here, and see that they do.
        """
        assert len(facts) == NUM_FACTS
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
        parts = self._group.gather(self._message(facts, tensors, given))
        if _are_equal(parts):
            return None
        rows = _on_host(parts)
        differs = (rows[:, :NUM_FACTS] != rows[0, :NUM_FACTS]).any(0).nonzero()
        if len(differs):
            return int(differs[0])
        counts = rows[:, NUM_FACTS : NUM_FACTS + _COUNTS]
        if bool((counts != counts[0]).any()):
            return VALUES
        sums = rows[:, NUM_FACTS + _COUNTS :]
        dtypes = [one.dtype for one in given] + [tensor.dtype for tensor in tensors[:_SLOTS]]
        are_alike = all(agree_at(sums, place, dtype) for place, dtype in enumerate(dtypes))
        return None if are_alike else VALUES

    def of_all(self, number: int) -> list[int]:
        """Return the ``number`` of every rank, by rank. A collective."""
        device = torch.device(self._group.device)
        parts = self._group.gather(torch.tensor([number], dtype=torch.int64, device=device))
        return [int(part) for part in parts]

    def _message(
        self, facts: Sequence[float], tensors: Sequence[torch.Tensor], given: Sequence[Sums]
    ) -> torch.Tensor:
        """Return the facts, how many sums there are, and the sums; of the last tensors one."""
        numbers = [*facts, float(len(tensors)), float(len(given))]
        device = tensors[0].device if tensors else torch.device(self._group.device)
        slots = [one.sums.to(device) for one in given]
        slots += [sums_of(tensor).to(device) for tensor in tensors[:_SLOTS]]
        for rest in tensors[_SLOTS:]:
            slots[-1] = slots[-1] + sums_of(rest).to(device)
        numbers += [0.0] * (NUM_SUMS * (_GIVEN_SLOTS + _SLOTS - len(slots)))
        row = torch.tensor(numbers, dtype=torch.float64, device=device)
        if not slots:
            return row
        head = NUM_FACTS + _COUNTS
        return torch.cat([row[:head], *slots, row[head:]])


def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
    """Whether every rank sent the same numbers, and only numbers."""
    return all(torch.equal(part, parts[0]) for part in parts[1:])


def _on_host(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a row for each rank."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.stack(list(parts)).cpu()
