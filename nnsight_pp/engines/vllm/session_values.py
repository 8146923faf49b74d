"""The client's side of `model.session()` on an engine: names for tensors that stay on the ranks.

What a trace binds is there for the lines and the traces behind it. A tensor of it is a lazy value:
the next trace's block gets it on the ranks, where it is; a line between the traces that needs its
data brings it here. When the session ends, also by an error, the ranks forget all of it.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.kept import AtHome, Kept
from nnsight_pp.core.location import Location, Visit
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.engines.vllm.root import object_of
from nnsight_pp.errors import InternalError, NotSupportedError, OutsideTraceError, explain
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.wire.value_codec import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nnsight_pp.engines.vllm.root import VLLMTree


log = logging.getLogger(__name__)


@final
class SessionValues:
    """The values of the session that is on, if any; sessions of one model inside it are part of it.

    Args:
        root: The model.
        call: Calls a method on every rank and returns their answers.
    """

    def __init__(self, root: VLLMTree, call: Callable[..., list[Any]]) -> None:
        self._root = root
        self._call = call
        self._depth = 0
        # The ranks' name for the session that is on, or an empty text.
        self.name = ""

    def begin(self) -> None:
        """Begin a session, or one inside it."""
        self._depth += 1
        if self._depth == 1:
            self.name = uuid.uuid4().hex

    def end(self) -> None:
        """End it; let the ranks forget what they keep."""
        self._depth -= 1
        if self._depth == 0:
            name, self.name = self.name, ""
            if self._root.dispatched:
                try:
                    self._call("nnsight_release", name)
                except Exception as error:  # a dead engine keeps nothing; what killed it is said
                    log.warning("the engine could not be told that a session is over: %s", error)

    def bound(self, kept: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a trace has bound.

        Args:
            kept: Its report of it.
            names: The objects that its names stood for.
        """

        def here(leaf: Any) -> Any:
            if isinstance(leaf, Kept):
                return LazyRemoteTensor(_OnRanks(self, leaf))
            if isinstance(leaf, AtHome):
                is_name = leaf.kind == "name"
                return (
                    names[leaf.name] if is_name else object_of(self._root, (leaf.kind, leaf.name))
                )
            return leaf

        return {
            name: Lost(name, value.name)
            if isinstance(value, AtHome) and value.kind == "lost"
            else map_leaves(value, here)
            for name, value in kept.items()
        }

    def whole(self, value: Any) -> Any:
        """Return ``value`` with all its tensors brought here, lists and dicts as they are."""
        kind = type(value)
        if issubclass(kind, RemoteValue):
            return value._real_value()
        if kind is list:
            value[:] = [self.whole(one) for one in value]
            return value
        if kind is dict:
            value.update({key: self.whole(one) for key, one in value.items()})
            return value
        return map_leaves(
            value, lambda leaf: leaf._real_value() if issubclass(type(leaf), RemoteValue) else leaf
        )

    def fetch(self, key: str, picks: Sequence[Any]) -> Any:
        """Bring a part of a kept tensor."""
        session = key.partition(":")[0]
        if session != self.name:
            name = key.split("/")[1]
            raise OutsideTraceError(
                explain(
                    f"The value {name!r} of a session was used when it was over.",
                    why="What the traces of a session bind stays on the ranks until it ends.",
                    todo="Save it with `.save()` in its trace.",
                )
            )
        for answer in self._call("nnsight_resident", to_bytes((key, tuple(picks)))):
            if answer:
                return from_bytes(answer)
        raise InternalError(f"no rank keeps {key}")


@final
class Lost:
    """Stands for a value of a session that cannot leave the ranks; whoever uses it is told."""

    def __init__(self, name: str, what: str) -> None:
        self.__dict__.update(_name=name, _what=what)

    def _refuse(self, *_: Any) -> Any:
        raise NotSupportedError(
            explain(
                f"{self._name!r}, which an earlier trace of the session has bound, is "
                f"{self._what}.",
                why="Only tensors, plain data and the model's modules are kept for a session.",
                todo="Make it outside of the traces, or in the block that uses it.",
            )
        )

    __getattr__ = __setattr__ = __call__ = __getitem__ = __setitem__ = __reduce_ex__ = _refuse
    __iter__ = __len__ = __bool__ = __contains__ = __enter__ = __exit__ = _refuse


@final
class _OnRanks:
    """The source of a lazy value of the client."""

    __slots__ = ("_kept", "_values", "visit")

    is_here = False
    sums_alike = casts_copy = False
    shard = None

    def __init__(self, values: SessionValues, kept: Kept) -> None:
        self._values = values
        self._kept = kept
        self.visit = Visit(Location("session", kept.key.split("/")[1]), 0)

    @property
    def name(self) -> tuple[str, tuple[int, ...]]:
        """What travels in its place: the key, and the stages that have it."""
        return self._kept.key, self._kept.stages

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """See `parallel.pulled.Source`."""
        return self._values.fetch(self._kept.key, picks)

    def echo(self, error: Exception) -> None:
        """See `parallel.pulled.Source`: the line that fails raises it."""


def name_of_kept(obj: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return what travels in place of a lazy value of a session, or None where it must itself.

    It must where it has been edited here, or its data was brought.
    """
    if not issubclass(type(obj), LazyRemoteTensor) or not obj._is_left_with_owner():
        return None
    pulled = obj._tree.pulled
    if not isinstance(pulled.source, _OnRanks):
        return None
    return "kept", (*pulled.source.name, (*pulled.made_by, *obj._picks))
