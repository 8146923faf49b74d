"""Objects that blocks on different copies have changed: put together at home, or refused.

The blocks of one parcel (a request's stored edits and its own block, invokes that depend on each
other) share the objects around them on the ranks. Those of different parcels do not: what both add
to a list is put together at home, but where one has changed what another has looked at or changed
too, it did not see it. Mostly the text tells before the run, and such blocks are one parcel
(`dependence`); this is for what no text tells.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.core.growth import UNKNOWN, dates_in
from nnsight_pp.engines.vllm.touched import Touched, key_of
from nnsight_pp.errors import NotSupportedError, Where, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.growth import Date
    from nnsight_pp.wire.block_codec import BlockMessage


# What is put into them stands in some order.
_ORDERED = ("list", "dict")


class Made(NamedTuple):
    """One change of an object around a block.

    Attributes:
        parcel: Whose copy was changed.
        message: The block that tells of it.
        name: By which of its names.
        target: The client's own object.
        change: As `outer` tells it.
    """

    parcel: Any
    message: BlockMessage
    name: str
    target: Any
    change: Any


def conflict_of(
    made: Sequence[Made], parcels: Sequence[tuple[Any, BlockMessage]]
) -> NotSupportedError | None:
    """Return the error for changes that blocks of other parcels have not seen; None without one.

    Args:
        made: The changes of one run.
        parcels: Its blocks, each with the parcel that it is of.
    """
    if len({parcel for parcel, _ in parcels} | {one.parcel for one in made}) < 2:
        return None
    by_key: dict[Any, list[Made]] = {}
    for one in made:
        by_key.setdefault(key_of(one.target), []).append(one)
    for found in by_key.values():
        if len({one.parcel for one in found}) > 1 and not _add_up(found):
            return _refusal(found[0], found[-1].message)
    seen = [(message, Touched.of(message).seen) for _, message in parcels] if made else []
    for key, found in by_key.items():
        for (parcel, _), (message, keys) in zip(parcels, seen, strict=True):
            others = [one for one in found if one.parcel != parcel and one.message is not message]
            if key in keys and others:
                return _refusal(others[0], message)
    return None


def _add_up(found: list[Made]) -> bool:
    """Whether the changes that several blocks have made to one object can all be made."""
    kinds = {one.change[0] for one in found}
    if len(kinds) > 1:
        return False
    parts = [one.change[1:] for one in found]
    (kind,) = kinds
    if kind == "set":
        return not any(removed for _, removed in parts)
    if kind not in ("list", "dict", "fields", "around"):
        return False
    if kind != "list" and any(any(rest[:2]) for _, *rest in parts):
        return False
    keys = [key for changed, *_ in parts for key in _keys_of(changed)]
    return len(set(keys)) == len(keys) and (kind not in _ORDERED or _dated(found) is not None)


def _dated(found: list[Made]) -> list[tuple[Date | tuple[int, int], Any]] | None:
    """Return what these blocks have put anew into one list or dict, each with what orders it.

    None where the order that one process would have it in is not known.
    """
    dated: list[tuple[Date, Any, Any]] = []
    for one in found:
        _, changed, *rest = one.change
        is_list = one.change[0] == "list"
        new = rest[0] if is_list else [pair for pair in changed if pair[0] not in one.target]
        dates = dates_in(rest[-1])
        if len(dates) != len(new):  # something was taken out as well
            return None
        dated += [(*pair, one.parcel) for pair in zip(dates, new, strict=True)]
    unknown = {date[:2] for date, _, _ in dated if date.position == UNKNOWN}
    for place in unknown:
        if len({parcel for date, _, parcel in dated if date[:2] == place}) > 1:
            return None
    return [(date[:2] if date[:2] in unknown else date, item) for date, item, _ in dated]


def _put_by(found: list[Made]) -> list[Any]:
    """Return what these blocks, whose changes add up, have put anew into one list or dict."""
    dated = _dated(found)
    assert dated is not None
    return [item for _, item in sorted(dated, key=itemgetter(0))]


def in_one_order(made: Sequence[Made]) -> list[tuple[Any, Any]]:
    """Return the objects that have changed, each with a change to make.

    Args:
        made: Changes that add up. What several blocks have put into one list or dict becomes one
            change of it.
    """
    by_key: dict[Any, list[Made]] = {}
    for one in made:
        by_key.setdefault((key_of(one.target), one.change[0]), []).append(one)
    changes: list[tuple[Any, Any]] = []
    for (_, kind), found in by_key.items():
        target = found[0].target
        if len(found) == 1 or kind not in _ORDERED:
            changes += [(one.target, one.change) for one in found]
        elif kind == "list":
            slots = {at: item for one in found for at, item in one.change[1].items()}
            changes.append((target, ("list", slots, _put_by(found))))
        else:
            old = [pair for one in found for pair in one.change[1] if pair[0] in target]
            changes.append((target, ("dict", [*old, *_put_by(found)], [], [])))
    return changes


def _keys_of(changed: Any) -> list[Any]:
    return [key for key, _ in (changed.items() if isinstance(changed, dict) else changed)]


def _refusal(one: Made, other: BlockMessage) -> NotSupportedError:
    block = one.message.block
    line = block.line_naming(one.name)
    where = None if line is None else Where(block.filename, line)
    what = f"{type(one.target).__name__} that {one.name!r} leads to"
    who = "each of several sequences" if other is one.message else "another block of the run"
    return NotSupportedError(
        explain(
            f"The {what} was changed, and {who} uses it too.",
            where=where,
            why="On an engine each request works on a copy of what its block and its stored edits "
            "name, unless the texts of the blocks show that one sees what another does.",
            todo="Use separate traces, let the blocks return values and put them together behind "
            "the trace, or change the object in the block itself.",
        )
    )
