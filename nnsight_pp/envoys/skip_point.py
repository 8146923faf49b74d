"""`.skip(value)`: a module or an operation that is not run, with the value in place of its output.

The point stands behind the input and before the call, and is offered only in a run in which some
block has asked to skip anything. A skipped module's own modules and operations are not reached.

On an engine a module is run for all requests of a step at once. There a skipped one is run too, and
the request's rows of its output are replaced: whoever skips it waits until it has run, and nothing
inside is served to that request meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.core.location import Location
from nnsight_pp.core.rows import Replacement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nnsight_pp.envoys.source_calls import Offer

# What `replacement` returns where the call is made.
NOT_SKIPPED = object()


def replacement(offers: Iterable[Offer]) -> Any:
    """Return what a block gives in place of the call that comes next, or `NOT_SKIPPED`.

    Raises:
        RowsError: The blocks of a batch skip it for some of the rows only.
    """
    for gate, serve, path in offers:
        if gate.is_skipping:
            offered = Replacement()
            given = serve(Location(path, "skip"), offered)
            if given is not offered:
                return given
            if offered.parts:
                return offered.whole(path)
    return NOT_SKIPPED


def with_rows_replaced(offers: Iterable[Offer], value: Any) -> Any:
    """Return ``value``, the output of a call that was made, with the rows of those who skip it."""
    for gate, serve, path in offers:
        if gate.runs_skipped:
            value = serve(Location(path, "skipped"), value)
    return value
