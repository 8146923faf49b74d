"""One call of a rewritten function: each operation that it runs is offered to the gates.

An operation is a location like any other: ``model.mlp.source.relu_0.output``. A call offers its
input, then runs, then offers its output; an assignment offers the value that is stored. While a
call is offered, a block may ask what it would run, and look inside that too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

from nnsight_pp.core.location import Location
from nnsight_pp.envoys.skip_point import NOT_SKIPPED, replacement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.envoys.gate import Gate
    from nnsight_pp.envoys.source_peel import Body
    from nnsight_pp.envoys.source_rewrite import Rewritten


class Offer(NamedTuple):
    """One tree that looks on.

    Attributes:
        gate: The tree's gate.
        serve: What it serves through during this call.
        path: Where the rewritten function stands in that tree.
    """

    gate: Gate
    serve: Callable[[Location, Any], Any]
    path: str


def operation_path(path: str, name: str) -> str:
    """Return the path of the operation ``name`` of the function that stands at ``path``."""
    return f"{path}.source.{name}"


@final
class Calls:
    """What a rewritten function calls `OPS`, in one call of it.

    Attributes:
        body: What runs.
        number: Which operation is being offered.
        called: What it would call.
        inside: Set by a block that looks inside: run this in place of ``called``.
    """

    __slots__ = ("_offers", "_places", "body", "called", "inside", "number")

    def __init__(self, body: Body, offers: Sequence[Offer]) -> None:
        self.body = body
        self.number = -1
        self.called: Any = None
        self.inside: Body | None = None
        self._offers = offers
        self._places = [(one.serve, places_of(body.rewritten, one.path)) for one in offers]

    def call(self, number: int, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the text."""
        self.number, self.called = number, called
        for serve, places in self._places:
            args, kwargs = serve(places[number][0], (args, kwargs))
        inside, self.inside, self.called = self.inside, None, None
        value = NOT_SKIPPED
        for gate, _, _ in self._offers:
            if gate.is_skipping:
                value = replacement(self._offers_of(number))
                break
        if value is NOT_SKIPPED:
            if inside is None:
                value = called(*args, **kwargs)
            else:
                value = run_offered(inside, self._offers_of(number), args, kwargs)
        for serve, places in self._places:
            value = serve(places[number][1], value)
        return value

    def _offers_of(self, number: int) -> list[Offer]:
        name = self.body.rewritten.operations[number].name
        return [one._replace(path=operation_path(one.path, name)) for one in self._offers]

    def value(self, number: int, value: Any, /) -> Any:
        """Store one value of the text."""
        for serve, places in self._places:
            value = serve(places[number][1], value)
        return value


# Of each function at each path: the places of its operations, in their order.
# Invariant: the function is kept, so that its id stays its own.
_places: dict[tuple[int, str], tuple[Rewritten, list[tuple[Location, Location]]]] = {}
_MOST_PLACES = 10_000


def places_of(rewritten: Rewritten, path: str) -> list[tuple[Location, Location]]:
    """Return where each operation's input and output are, for the function at ``path``."""
    known = _places.get((id(rewritten), path))
    if known is None:
        if len(_places) >= _MOST_PLACES:
            _places.clear()
        paths = [operation_path(path, name) for name in rewritten.names]
        found = [(Location(one, "input"), Location(one, "output")) for one in paths]
        known = _places[id(rewritten), path] = (rewritten, found)
    return known[1]


def run_offered(
    body: Body, offers: Sequence[Offer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``body`` once, with its operations offered to every tree of ``offers``."""
    for _, serve, path in offers:
        # Counts the calls whose operations were offered (see `operations.Source`).
        serve(Location(path, "source"), None)
    calls = Calls(body, offers)
    before = [one.gate.open.get(one.path) for one in offers]
    for one in offers:
        one.gate.open[one.path] = calls
    try:
        return body.around(calls)(*args, **kwargs)
    finally:
        for one, outer in zip(offers, before, strict=True):
            if outer is None:
                one.gate.open.pop(one.path, None)
            else:
                one.gate.open[one.path] = outer
