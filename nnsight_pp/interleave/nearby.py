"""An ask where this process computes everything and counts visits: most rules say nothing there.

There is no gate, no other stage, no number that another rank must agree with. What is left is
compiled (`csrc/near_ask.cpp`, `csrc/near_visit.cpp`): from a node's attribute to the switch, and
from the serve point to the block. What is out of the ordinary (a late ask, the result, a skip, a
value with a lens) is left to `interleave.asks` and `interleave.interleaver`, which would also do
what is done there, in more steps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent

from nnsight_pp.core.ask import Read
from nnsight_pp.core.rows import BatchCut, Replacement, WholeCut
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension
from nnsight_pp.interleave.kept_open import commit_last
from nnsight_pp.interleave.shell import Shell
from nnsight_pp.interleave.visit import Handed, OpenVisit
from nnsight_pp.interleave.worker import Memo, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.location import Location
    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.interleave.parked import Parked

    # How many visits of each location are over, who waits where, what parks a worker among others.
    Near = tuple[dict[Location, int], dict[Location, list[Worker]], Callable[..., None]]


@functools.cache
def compiled() -> Any:
    """Return the compiled module, which knows the classes of asks and visits from now on.

    None where it is not in use, or may not park inside torch.
    """
    switch = thread_state.load()
    if switch.name != "native" or not switch.may_park_in_torch:
        return None
    extension: Any = load_extension()
    extension.near_classes(
        Worker, Read, OpenVisit, Handed, Shell, BatchCut, Memo, WholeCut, Replacement,
        torch.Tensor, after_turn,
    )  # fmt: skip
    return extension


def state(counts: dict[Location, int] | None, parked: Parked) -> Near | None:
    """Return what the short way looks at, or None where it is not to be taken."""
    if counts is None or compiled() is None:
        return None
    return counts, parked.by_location, parked.add


def read(worker: Worker, location: Location) -> Any:
    """Return the value of ``location``, parking until it is there, or NotImplemented.

    Call it where no value of this location is open or kept.
    """
    return NotImplemented if worker.near is None else compiled().near_read(worker, location)


def serving(
    turns: Interleaver, foreign: Callable[[Location, Any], Any], abandoned: type[BaseException]
) -> Callable[[Location, Any], Any]:
    """Return what serves the values that the calling greenlet computes.

    Args:
        turns: Those of the run.
        foreign: Serves what else is offered, and what is out of the ordinary.
        abandoned: Raised where a block has failed.
    """
    near = turns.asks.near
    if near is None:
        return foreign
    serve: Callable[[Location, Any], Any] = compiled().near_serve(
        near, turns, getcurrent(), foreign, abandoned, turns.switch.switch, turns.asks.released,
        turns.observers.at, turns.skips.held,
    )  # fmt: skip
    return serve


def after_turn(turns: Interleaver, worker: Worker) -> None:
    """Do what is left to do after a turn of ``worker`` that has ended it, or let others through."""
    if worker.has_ended:
        if worker.visit is not None:
            commit_last(worker)
        turns.ended(worker)
    while turns.asks.released:
        turns.resume(turns.asks.released.pop(0), None)


def quicken(nodes: type, kept_as: dict[str, str], savable: Callable[[Any], Any]) -> None:
    """Let nodes of the class ``nodes`` take the short way to their values.

    Args:
        nodes: A class with properties.
        kept_as: By the name of a property: where a node keeps its location.
        savable: What becomes of a value that is not a plain tensor.
    """
    extension = compiled()
    if extension is None:
        return
    properties = {}
    for name, attribute in kept_as.items():
        slow: property = getattr(nodes, name)
        quick = property(
            extension.near_getter(attribute, slow.fget, savable), slow.fset, doc=slow.__doc__
        )
        setattr(nodes, name, quick)
        properties[name] = (quick, attribute)
    setter = extension.near_setter(nodes, properties, nodes.__setattr__)
    nodes.__setattr__ = setter  # type: ignore[method-assign]
