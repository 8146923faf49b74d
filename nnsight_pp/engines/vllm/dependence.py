"""Which invokes of a trace depend on each other, so that their requests must run in the same steps.

Two do where one may look up a name that the other binds, where one puts something into an object
that the other looks at, or where both use one barrier. What a block may do is read from its text
(`core.sharing`). Everything else stays as independent as requests of strangers.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import leaves
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.interleave.barrier import Barrier
from nnsight_pp.trace.tracer import BlockTracer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.trace.tracer import Invocation

# Of these a block changes nothing that another one could see, or they are no object of the user's.
_CONSTANT = (
    int, float, complex, str, bytes, type(None), type, range, frozenset,
    FunctionType, BuiltinFunctionType, ModuleType, Envoy, BlockTracer,
)  # fmt: skip
_CONTAINERS = (list, dict, set, tuple)


def companies_of(invocations: Sequence[Invocation]) -> list[list[int]]:
    """Return the positions of the invokes that depend on each other, company by company."""
    if len(invocations) < 2:
        return []
    able = [number for number, one in enumerate(invocations) if not one.block.does_nothing()]
    facts = {number: _Facts(invocations[number]) for number in able}
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

    def __init__(self, invocation: Invocation) -> None:
        block, uses = invocation.block, invocation.block.uses()
        self._frame = invocation.frame
        self._early = uses.early
        self._binds = block.binds()
        # By id; the user's frame keeps the objects alive.
        self._put: set[int] = set()
        self._seen: set[int] = set()
        self.barriers: set[int] = set()
        around = invocation.names.beyond_siblings().look_up(block.reads())
        for name, value in around.items():
            if issubclass(type(value), RemoteValue):
                continue  # a block may not change what a session keeps
            if isinstance(value, (Barrier, *_CONTAINERS)):
                found = (one for one in leaves(value) if issubclass(type(one), Barrier))
                self.barriers |= {id(one) for one in found}
            if isinstance(value, (*_CONSTANT, Barrier)):
                continue
            may_change = name in uses.handed and isinstance(value, _CONTAINERS)
            if name in uses.put or may_change:
                self._put.add(id(value))
            if name in uses.seen:
                self._seen.add(id(value))

    def needs(self, other: _Facts) -> bool:
        """Whether this block may see what ``other`` does."""
        shares_names = self._frame == other._frame and bool(self._early & other._binds)
        return shares_names or bool(self._seen & other._put)
