"""`model.edit()` on an engine: stored blocks, which run first in every request of this client.

The client keeps the blocks, and sends with each request those that it uses: there each is a block
of its own, beside the same rows, served before the request's own block. Where they share an object
that one of them changes, it is one on the ranks, or they are refused. Nothing is stored on the
ranks, so requests of others are left alone.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.tree import leaves
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.message import encoded, of_this_moment
from nnsight_pp.engines.vllm.touched import Touched, leads_to
from nnsight_pp.envoys.cache_view import CacheView
from nnsight_pp.errors import ConfigurationError, NotSupportedError, Where, explain
from nnsight_pp.trace.raised import exception_of
from nnsight_pp.wire.block_codec import BlockMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nnsight_pp.core.report import Report
    from nnsight_pp.envoys.edits import Edit
    from nnsight_pp.envoys.envoy import Envoy


@dataclass(eq=False, slots=True)
class StoredEdit:
    """One stored block; ``edit`` is set when its `with` is left.

    It is what `as` binds second, to take the block away again.
    """

    _all: list[StoredEdit]
    name: str | None
    edit: Edit | None = None

    def clear(self) -> None:
        """Forget the block: runs that begin from now on do without it."""
        if self in self._all:
            self._all.remove(self)

    def store(self, edit: Edit) -> None:
        """Let every run from now on, or with ``name`` those that ask for it, begin with the block.

        Raises:
            ConfigurationError: Another one has that name.
        """
        if self.name is not None and any(one.name == self.name for one in self._all):
            raise ConfigurationError(
                explain(
                    f"An edit named {self.name!r} is installed already.",
                    todo="Use another name, or `edit.clear()` the first one.",
                )
            )
        self.edit = edit
        self._all.append(self)


@final
class StoredEdits:
    """The stored blocks of one model, in the order in which they were stored."""

    def __init__(self) -> None:
        self._all: list[StoredEdit] = []

    def new(self, name: str | None) -> StoredEdit:
        """Return what a block is stored in."""
        return StoredEdit(self._all, name)

    def clear(self) -> None:
        """Forget all of them."""
        self._all.clear()

    def chosen(self, names: Iterable[str] | None) -> list[Edit]:
        """Return the blocks that have no name, and those of ``names``.

        Raises:
            TypeError: ``names`` is no list of names.
            ConfigurationError: A name that no block has.
        """
        if isinstance(names, str) or not isinstance(names, (list, tuple, set, type(None))):
            raise TypeError(f"`edits` takes a list of edit names, not {names!r}")
        wanted = set(names or ())
        unknown = wanted - {one.name for one in self._all}
        if unknown:
            known = ", ".join(repr(one.name) for one in self._all if one.name is not None)
            raise ConfigurationError(
                explain(
                    f"No edit is installed under the name {sorted(unknown, key=str)[0]!r}: "
                    "no edit is installed under that name.",
                    why=f"Installed: {known or 'none with a name'}.",
                    todo="Store it with `with model.edit(name=...) as (tracer, edit):`.",
                )
            )
        return [
            one.edit
            for one in self._all
            if one.edit is not None and (one.name is None or one.name in wanted)
        ]


@dataclass(slots=True)
class RequestEdits:
    """The stored blocks of one request on its way.

    Attributes:
        messages: The blocks, each under a name of its own.
        saves: What they have saved, once the run is over.
        is_boarded_together: Whether they and the request's own block went in one piece.
    """

    messages: list[BlockMessage]
    saves: dict[str, Any] = field(default_factory=dict)
    is_boarded_together: bool = False

    @classmethod
    def of(cls, trace: str, edits: Iterable[Edit]) -> RequestEdits:
        """Return ``edits`` for the request that the client calls ``trace``."""
        messages = []
        for number, edit in enumerate(edits):
            seed, surroundings = of_this_moment(edit.block)
            names = edit.names.look_up(edit.block.needs())
            name = f"{trace} edit {number}"
            messages.append(
                BlockMessage(
                    name,
                    edit.block,
                    names,
                    seed=seed,
                    surroundings=surroundings,
                )
            )
        return cls(messages)

    def traces(self) -> list[str]:
        """Return the names under which the ranks report on them."""
        return [message.trace for message in self.messages]

    def shares_with(self, own: BlockMessage | None, *, may_share: bool) -> bool:
        """Whether one of the blocks may see what another, or ``own``, does to an object.

        Args:
            own: The request's own block, or None.
            may_share: Whether it can. Blocks run ahead of the model where another stage computes
                what they ask for, so only those of one stage do things in the order of the model.

        Raises:
            NotSupportedError: They do, and cannot.
        """
        blocks = [*self.messages, *([] if own is None else [own])]
        if len(blocks) < 2:
            return False
        touched = [Touched.of(one) for one in blocks]
        for number, (block, one) in enumerate(zip(blocks, touched, strict=True)):
            for other in touched[:number]:
                shared = one.shared_with(other)
                if shared and not may_share:
                    raise _shared(block, shared)
                if shared:
                    return True
        return False

    def board(
        self,
        params: Any,
        own: BlockMessage | None,
        name_of: Callable[[Any], Any],
        *,
        together: bool = False,
    ) -> None:
        """Let ``params``, vLLM's sampling parameters, carry the blocks.

        Args:
            params: The request's.
            own: The request's own block, or None.
            name_of: Returns what stands for an object that exists on both sides, or None.
            together: Whether they share objects. Then the own block goes with them in one piece,
                and what is one object in several is one on the ranks.

        Raises:
            NotSupportedError: More than one sequence is asked for.
        """
        self.is_boarded_together = together
        if not self.messages:
            return
        if params.n != 1:
            raise NotSupportedError(
                explain(
                    f"n={params.n} sequences were asked for with a stored edit.",
                    why="A stored edit runs beside one sequence.",
                    todo="Use one `tracer.invoke(prompt, seed=...)` for each sequence.",
                )
            )
        beside = [] if own is None else [own]
        parcels = [[*self.messages, *beside]] if together else [[one] for one in self.messages]
        data = [([one.trace for one in of], encoded(of, name_of)) for of in parcels]
        # A request without a block of its own is to be scheduled as one with a block.
        no_block = pickle.dumps(("", None, None, None))
        extra = {compat.PAYLOAD: no_block, **(params.extra_args or {})}
        params.extra_args = {**extra, compat.EDITS: pickle.dumps((self.traces(), data))}

    def settle(self, reports: dict[str, list[Report]], root: Envoy) -> BaseException | None:
        """Take in what the blocks saved; return the first exception of one.

        Args:
            reports: By trace, merged and with the client's own objects.
            root: The model.
        """
        first: BaseException | None = None
        for message in self.messages:
            (report,) = reports[message.trace]
            self.saves.update(report.saved)
            for leaf in leaves((report.saved, report.grown)):
                if isinstance(leaf, CacheView):
                    leaf.belongs_to(root)
            for text in report.warnings:
                warnings.warn(text, UserWarning, stacklevel=8)
            if report.failure is not None and first is None:
                first = exception_of(report.failure)
        return first


def _shared(block: BlockMessage, keys: set[Any]) -> NotSupportedError:
    """Return the error for ``block``, which shares the objects of ``keys`` with a stored edit."""
    name = next((name for name, one in block.names.items() if leads_to(one, keys)), None)
    line = None if name is None else block.block.line_naming(name)
    what = "An object" if name is None else f"What {name!r} leads to"
    return NotSupportedError(
        explain(
            f"{what} is changed in a stored edit or a block, and used in another of the request.",
            where=None if line is None else Where(block.block.filename, line),
            why="On several stages, and in invokes that share names, blocks run ahead of the "
            "model, so they would not see each other's changes in its order.",
            todo="Do both in one block, or save the value in the edit and read it in "
            "`output.saves`.",
        )
    )
