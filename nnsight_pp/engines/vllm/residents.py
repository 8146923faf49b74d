"""The tensors that one rank keeps for a session, from one of its traces to the next.

A block that uses one gets a lazy value, on every stage: where the tensor is, it is at hand, and
elsewhere it is pulled when a line needs it, at any time, as a weight is. A kept tensor never
changes: a block that edits one in place is refused when it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.kept import (
    AtHome,
    Kept,
    NotKeptError,
    is_plain_data,
    with_kept,
)
from nnsight_pp.core.location import Location, Visit
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.report import Elsewhere
from nnsight_pp.engines.vllm.root import name_of
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.interleave.remote import RemoteAsk
from nnsight_pp.interleave.worker import current_worker
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.parallel.pulled import OwnConstant, pick

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.wire.block_codec import BlockMessage

PLACE = "resident"
PREFIX = f"{PLACE}."


@final
class Residents:
    """What one rank keeps, by session.

    Args:
        root: The tree of this rank.
        stage: This rank's.
    """

    def __init__(self, root: Envoy, stage: int) -> None:
        self._root = root
        self._stage = stage
        self._of: dict[str, dict[str, torch.Tensor]] = {}
        # What was handed out since `take_given`.
        self._given: list[LazyRemoteTensor] = []

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._of.values())

    # -- behind a trace ------------------------------------------------------------------------

    def bound(
        self, message: BlockMessage, request: str, own: dict[str, Any], saved: Container[str]
    ) -> dict[str, Any]:
        """Return the report's form of what a block has bound; keep the tensors in it.

        Args:
            message: The block, with the objects that the client has. Outside of a session
                nothing is kept.
            request: The name of its request, alike on every stage.
            own: What it has bound.
            saved: The names that are reported anyway.
        """
        session, outer = message.session, message.names
        if not session:
            return {}
        binds = message.block.binds()
        names = {name: own[name] for name in sorted(binds) if name in own and name not in saved}
        at_home = {id(value): name for name, value in outer.items() if not is_plain_data(value)}
        found = {}
        for name, value in names.items():
            if id(value) in at_home:
                found[name] = AtHome("name", at_home[id(value)])
                continue
            try:
                found[name] = with_kept(
                    value, f"{request}/{name}", lambda key, leaf: self._keep(session, key, leaf)
                )
            except NotKeptError as error:
                found[name] = AtHome("lost", f"a {error}")
        return found

    def _keep(self, session: str, key: str, leaf: Any) -> Any:
        named = name_of(self._root, leaf)
        if named is not None:
            return AtHome(*named)
        if issubclass(type(leaf), RemoteValue):
            if not leaf._is_of_this_rank():
                return Elsewhere()
            leaf = leaf._real_value()
        if not isinstance(leaf, torch.Tensor):
            raise NotKeptError(type(leaf).__name__)
        with torch.inference_mode(False), torch.no_grad():
            self._of.setdefault(session, {})[key] = leaf.detach().clone()
        return Kept(f"{session}:{key}", (self._stage,))

    # -- before the next -----------------------------------------------------------------------

    def give(self, key: str, stages: Sequence[int], picks: Sequence[Any]) -> LazyRemoteTensor:
        """Return what a block gets of a kept tensor."""
        location = Location(PLACE, key)
        if self._stage in stages:
            proxy = LazyRemoteTensor(OwnConstant(location, self.tensor(key)), _refusal)
        else:
            proxy = LazyRemoteTensor(_OfOtherStage(location, stages[0]), _refusal)
        self._given.append(proxy)
        for step in picks:
            proxy = proxy._child(step)
        return proxy

    def take_given(self) -> list[LazyRemoteTensor]:
        """Return what was given since this was called before."""
        given, self._given = self._given, []
        return given

    def tensor(self, key: str) -> torch.Tensor:
        """Return a kept tensor. The link's threads call this too."""
        session, _, inner = key.partition(":")
        return self._of[session][inner]

    def part(self, key: str, picks: Sequence[Any]) -> Any:
        """Return what ``picks`` name of a kept tensor, in a tuple; an empty one elsewhere."""
        session, _, inner = key.partition(":")
        kept = self._of.get(session, {})
        return (pick(kept[inner], picks),) if inner in kept else ()

    def release(self, session: str) -> None:
        """Forget everything of ``session``."""
        self._of.pop(session, None)


@final
class _OfOtherStage:
    """The source of a tensor that another stage keeps."""

    __slots__ = ("_owner", "visit")

    is_here = False
    sums_alike = casts_copy = False
    shard = None

    def __init__(self, location: Location, owner: int) -> None:
        self.visit = Visit(location, 0)
        self._owner = owner

    def _ask(self) -> RemoteAsk:
        worker = current_worker(self.visit)
        assert worker.turns is not None
        turns, step = worker.turns, worker.step
        return RemoteAsk(turns, worker, -1, self._owner, self.visit.location, step, "constant")

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """See `parallel.pulled.Source`."""
        return self._ask().pull(picks, in_torch=in_torch)

    def echo(self, error: Exception) -> None:
        """See `parallel.pulled.Source`."""
        self._ask().echo(error)


def edited(given: Sequence[LazyRemoteTensor]) -> NotSupportedError | None:
    """Return the error for a block that has edited one of the kept tensors it was ``given``.

    An edit is refused at its line, by the proxy or by torch; this is for what neither has seen.
    """
    return _refusal() if any(one._is_edited() for one in given) else None


def _refusal() -> NotSupportedError:
    return NotSupportedError(
        explain(
            "A value of an earlier trace of the session was edited in place.",
            why="It stays on the ranks between the traces, where every stage may use it.",
            todo="Edit a copy of it: `value = value.clone()`.",
        )
    )
