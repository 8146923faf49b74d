"""What a rank reports of a block: what it has saved, and how it changed what came with it.

An object that came with the block goes home as a word for it, wherever it stands in what is
reported: the client puts its own there (`homecoming`). What stands in several places is one object
there too, and tensors and arrays that share memory share it (`wire.value_codec`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.core.tree import HoldsItselfError
from nnsight_pp.engines.vllm.members import PLAIN, Around
from nnsight_pp.engines.vllm.outer import change_of, home_of, moved_in
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.wire.homeward import Homeward

if TYPE_CHECKING:
    from nnsight_pp.engines.vllm.outer import Before
    from nnsight_pp.engines.vllm.traced_request import TracedRequest


class Sent(NamedTuple):
    """What goes home of one block.

    Attributes:
        saved: What it has saved, by name.
        grown: How it changed what came with it, by name.
        refused: Why something of it cannot.
    """

    saved: dict[str, Any]
    grown: dict[str, Any]
    refused: Exception | None = None


def homeward_of(requests: list[TracedRequest]) -> Homeward:
    """Return what brings the values of ``requests``, which share their objects, into reports."""
    moved = {found for one in requests for found in moved_in(one.before)}
    return Homeward((found for one in requests for found in home_of(one.trace, one.before)), moved)


def of_change(change: Any, ship: Homeward) -> Any:
    """Return what a report holds of a change: of a tensor or an array, its elements.

    Of one that shows another memory now, what shows that: it may be that of another from home.
    """
    kind, *parts = change
    if kind == "array":
        return kind, ship.literal(parts[0])
    if kind == "tensor":
        elements, grads, flags, is_moved = parts
        if is_moved:
            elements = ship([one.detach() for one in elements])
        else:
            elements = [*map(ship.literal, elements)]
        return kind, elements, [*map(ship.literal, grads)], flags, is_moved
    return ship(change)


def sent_home(traced: TracedRequest, own: dict[str, Any], ship: Homeward) -> Sent:
    """Return what goes home of the block of ``traced``, which has bound the names in ``own``."""
    worker, message = traced.worker, traced.message
    if worker is None or message is None:
        return Sent({}, {})
    grown: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    name = ""
    try:
        for name in sorted(message.block.binds()):
            if name in own and own[name] in worker.saves:
                saved[name] = ship(own[name])
        for name, before in traced.before.items():
            changes = change_of(before, None if message.seat is None else traced.growth)
            _check_names(before, changes, message.names)
            if changes:
                grown[name] = [(path, of_change(one, ship)) for path, one in changes]
    except NotSupportedError as error:
        return Sent(saved, {}, error)
    except HoldsItselfError as error:
        return Sent({}, {}, _holds_itself(name, str(error)))
    return Sent(saved, grown)


def _check_names(
    before: list[Before], changes: list[tuple[tuple[Any, ...], Any]], names: dict[str, Any]
) -> None:
    """Refuse where a function has bound anew a global name that the block looks up as well.

    Raises:
        NotSupportedError: The block has its names, and the function has those of its module.
    """
    functions = {one.path: one for one in before if isinstance(one.was, Around)}
    for path, change in changes:
        if change[0] != "around":
            continue
        function = functions[path]
        for name in (*change[1], *change[2]):
            is_global = name not in function.now.__code__.co_freevars
            if is_global and name in names and _is_same(names[name], function.was.get(name)):
                raise NotSupportedError(
                    explain(
                        f"{function.now.__qualname__} has bound the global name {name!r}, which "
                        "the block looks up too.",
                        why="On the ranks a function has the names of its module, and the block "
                        "has those that came with it.",
                        todo="Let it return the value, or keep it in a list or an object.",
                    )
                )


def _is_same(one: Any, other: Any) -> bool:
    is_plain = type(one) in PLAIN and type(one) is type(other)
    return one is other or (is_plain and one == other)


def _holds_itself(name: str, kind: str) -> NotSupportedError:
    return NotSupportedError(
        explain(
            f"A {kind} in {name!r} holds itself.",
            why="What a block saves is brought from the ranks piece by piece.",
            todo="Save the parts of it.",
        )
    )
