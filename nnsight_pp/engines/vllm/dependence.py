"""Which invokes of a trace depend on each other, so that their requests must run in the same steps.

Two do where one may look up a name that the other binds, where one puts something into an object
that the other looks at, where both change one that cannot be put together of what each has done, or
where both use one barrier. What a block may do is read from its text (`core.sharing`), and from
that of the functions that it calls (`touched`). Everything else stays as independent as requests of
strangers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.core.tree import leaves
from nnsight_pp.engines.vllm.touched import Touched
from nnsight_pp.interleave.barrier import Barrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.trace.tracer import Invocation

_CONTAINERS = (list, dict, set, tuple)


def companies_of(invocations: Sequence[Invocation]) -> list[list[int]]:
    """Return the positions of the invokes that depend on each other, company by company."""
    if len(invocations) < 2:
        return []
    able = [number for number, one in enumerate(invocations) if not one.block.does_nothing()]
    # By id: what stands in the objects around the blocks, which live until the end of the run.
    reached: dict[int, dict[Any, Any]] = {}
    facts = {number: _Facts(invocations[number], reached) for number in able}
    company = {number: {number} for number in able}
    for number in able:
        for other in able:
            if other != number and company[other] is not company[number]:
                one, two = facts[number], facts[other]
                if one.needs(two) or two.needs(one) or one.barriers & two.barriers:
                    company[number] |= company[other]
                    for member in company[other]:
                        company[member] = company[number]
    found = {id(members): sorted(members) for members in company.values() if len(members) > 1}
    return sorted(found.values())


class _Facts:
    """What one block looks up, binds, changes and looks at."""

    def __init__(self, invocation: Invocation, reached: dict[int, dict[Any, Any]]) -> None:
        block, uses = invocation.block, invocation.block.uses()
        self._frame = invocation.frame
        self._siblings = invocation.names.siblings
        self._early = uses.early
        self._binds = block.binds()
        around = invocation.names.beyond_siblings().look_up(block.reads())
        # By id; the user's frame keeps the objects alive.
        self._touched = Touched(uses, around, reached)
        self.barriers: set[int] = set()
        for value in around.values():
            if issubclass(type(value), (Barrier, *_CONTAINERS)):
                found = (one for one in leaves(value) if issubclass(type(one), Barrier))
                self.barriers |= {id(one) for one in found}

    def needs(self, other: _Facts) -> bool:
        """Whether this block may see what ``other`` does, or undo it."""
        is_beside = self._frame == other._frame
        shares_names = is_beside and any(
            self._may_see(name, other) for name in self._early & other._binds
        )
        mine, others = self._touched, other._touched
        return shares_names or bool(mine.seen & others.put) or bool(mine.strict & others.strict)

    def _may_see(self, name: str, other: _Facts) -> bool:
        one, two = self._siblings, other._siblings
        return one is None or two is None or one.may_see(name, two.position)
