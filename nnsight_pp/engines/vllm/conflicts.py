"""Objects that blocks on different copies have changed: put together at home, or refused.

The blocks of one parcel (a request's stored edits and its own block, invokes that depend on each
other) share the objects around them on the ranks. Those of different parcels do not: what both add
to a list is put together at home, but where one has changed what another has looked at or changed
too, it did not see it. Mostly the text tells before the run, and such blocks are one parcel
(`dependence`); this is for what no text tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.engines.vllm.touched import Touched, key_of
from nnsight_pp.errors import NotSupportedError, Where, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.wire.block_codec import BlockMessage


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
    if kind != "list" and any(any(rest) for _, *rest in parts):
        return False
    keys = [key for changed, *_ in parts for key in _keys_of(changed)]
    return len(set(keys)) == len(keys)


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
