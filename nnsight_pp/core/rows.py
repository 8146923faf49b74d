"""A request's share of a value that the model computes for a whole batch.

Three cuts: `WholeCut` gives the live object itself (one prompt in this process); `BatchCut` gives
views of a request's rows (several prompts in this process, in the autograd graph); `TokenCut`
gives copies of a request's rows of an engine's flat token batch.

Why an engine gives copies: its kernels overwrite activations in place, and a worker outside
inference mode cannot edit an inference tensor. A copy made outside inference mode counts its
edits in ``_version``, so an edited copy can be told from an untouched one and is written back
only then.

Letters: T tokens of the step's batch, R rows of this request, B batch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nnsight_pp.core.counted import EditsCounted
from nnsight_pp.core.tree import leaves, map_leaves
from nnsight_pp.errors import RowsError, explain

if TYPE_CHECKING:
    from collections.abc import Callable


class Rows(NamedTuple):
    """Which rows of a batch of ``total`` rows belong to one request."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    total: int


class WholeCut:
    """The live object, untouched: edits in place land by themselves."""

    __slots__ = ()

    def give(self, value: Any) -> Any:
        """Return ``value`` itself."""
        return value

    def marks(self, served: Any) -> None:
        """Nothing to remember."""

    def check(self, value: Any, assigned: Any) -> None:
        """Accept everything, as plain torch does."""

    def put(self, value: Any, served: Any, marks: Any, *, assigned: bool) -> Any:
        """Return what the worker assigned, or the value as it is."""
        return served if assigned else value


# It knows nothing, so one is enough.
WHOLE = WholeCut()


class BatchCut:
    """Views of a request's rows where the leading size is exactly the batch's."""

    # Known to csrc/near.hpp by their names.
    __slots__ = ("_bases", "rows", "span")

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        # As an index: torch is twice as fast with it as with `narrow`.
        self.span = slice(rows.start, rows.start + rows.count)
        # Of each view given that is in a graph: the tensor that the model goes on with.
        self._bases: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def _is_batched(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows.total
        )

    def give(self, value: Any) -> Any:
        """Return ``value`` with every batched tensor ``[B, ...]`` narrowed to ``[R, ...]``."""
        if type(value) is torch.Tensor:  # the usual case
            is_batched = value.dim() > 0 and value.size(0) == self.rows.total
            return self._narrowed(value) if is_batched else value
        return map_leaves(
            value, lambda leaf: self._narrowed(leaf) if self._is_batched(leaf) else leaf
        )

    def _narrowed(self, leaf: torch.Tensor) -> torch.Tensor:
        view = leaf[self.span]
        if view.requires_grad:
            self._bases[id(view)] = weakref.ref(view), leaf
        return view

    def base_of(self, view: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor of the whole batch of which ``view`` was given as this request's rows.

        The model goes on with that tensor, so it is the one that gradients flow to.
        """
        known, base = self._bases.get(id(view), (None, None))
        return base if known is not None and known() is view else None

    def marks(self, served: Any) -> list[Any]:
        """Return the leaves, kept alive, so that a replaced one is seen by identity."""
        if type(served) is torch.Tensor:
            return [served]
        return list(leaves(served))

    def check(self, value: Any, assigned: Any) -> None:
        """Raise `RowsError` where an assigned tensor has another number of rows."""
        if isinstance(value, Replacement):
            return
        live, new = list(leaves(value)), list(leaves(assigned))
        if len(live) != len(new):
            _refuse(f"{len(new)} values were assigned where the model has {len(live)}")
        for old, leaf in zip(live, new, strict=True):
            if not self._is_batched(old):
                continue
            rows = leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else 0
            if rows != self.rows.count:
                _refuse(f"{rows} rows were assigned, and this prompt has {self.rows.count}")

    def put(self, value: Any, served: Any, marks: list[Any], *, assigned: bool) -> Any:
        """Splice what was replaced into the batch; edits in place landed through the views."""
        if isinstance(value, Replacement):
            value.parts.append((self.rows, served))
            return value
        if not assigned:
            if is_unreplaced(served, marks):
                return value
            self.check(value, served)
        return with_leaves_of(value, served, self._splice)

    def _splice(self, live: Any, new: Any) -> Any:
        if not self._is_batched(live):
            return new
        start, count, total = self.rows
        after = live.narrow(0, start + count, total - start - count)
        return torch.cat([live.narrow(0, 0, start), new, after])


def is_unreplaced(served: Any, marks: list[Any]) -> bool:
    """Tell whether the leaves of ``served`` are still the objects in ``marks``."""
    if type(served) is torch.Tensor:
        return len(marks) == 1 and served is marks[0]
    new = list(leaves(served))
    return len(new) == len(marks) and all(a is b for a, b in zip(new, marks, strict=True))


def with_leaves_of(value: Any, served: Any, put_leaf: Callable[[Any, Any], Any]) -> Any:
    """Return ``value`` with ``put_leaf(leaf, its counterpart in served)`` for each leaf."""
    fresh = iter(list(leaves(served)))
    return map_leaves(value, lambda leaf: put_leaf(leaf, next(fresh)))


class Replacement:
    """The output of a call that is not made, as the requests of a batch give it.

    Attributes:
        parts: Each request's rows, and what it gives for them.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[tuple[Rows, Any]] = []

    def whole(self, path: str) -> Any:
        """Return the parts, joined.

        Raises:
            RowsError: They do not cover the batch.
        """
        parts = sorted(self.parts, key=lambda part: part[0].start)
        covered = 0
        for rows, _ in parts:
            covered = covered + rows.count if rows.start == covered else -1
        if covered != parts[0][0].total:
            _refuse(
                f"{path} was skipped by some of the invokes, which do not cover every row",
                "A call is made for the whole batch or not at all.",
                "Skip it in every invoke, or in one without an input.",
            )
        columns = zip(*(leaves(value) for _, value in parts), strict=True)
        joined = iter([self._joined(list(column)) for column in columns])
        return map_leaves(parts[0][1], lambda _: next(joined))

    def _joined(self, column: list[Any]) -> Any:
        counts = [rows.count for rows, _ in sorted(self.parts, key=lambda part: part[0].start)]
        is_rows = all(
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
            for leaf, count in zip(column, counts, strict=True)
        )
        return torch.cat(column) if is_rows else column[0]


class TokenCut:
    """Copies of a request's rows of the flat token batch, written back when edited.

    Args:
        rows: The request's rows.
        below: For token ids, how many there are: an id beyond would end the engine.
        edits: Gets an entry whenever an edit is put back. Default: a list of its own.

    Attributes:
        has_put: Whether an edit was put back through this very cut.
    """

    __slots__ = ("_below", "edits", "has_put", "rows")

    def __init__(
        self, rows: Rows, below: int | None = None, edits: list[bool] | None = None
    ) -> None:
        self.rows = rows
        self._below = below
        self.has_put = False
        self.edits: list[bool] = [] if edits is None else edits

    def for_visit(self, below: int | None) -> TokenCut:
        """Return a cut of one visit, which tells whether something was put back in it.

        Args:
            below: How many token ids there are, where that is known of the visit only.
        """
        return TokenCut(self.rows, self._below if below is None else below, self.edits)

    def _is_rows(self, leaf: torch.Tensor) -> bool:
        return leaf.dim() > 0 and leaf.shape[0] == self.rows.total

    def give(self, value: Any) -> Any:
        """Return ``value`` with every tensor copied, ``[T, ...]`` as ``[R, ...]``.

        Cost: one copy of the rows.
        """
        with EditsCounted():
            return map_leaves(value, self._copy)

    def look(self, value: Any) -> Any:
        """Return what `give` does without a copy, to be read at once and never edited."""
        if type(value) is tuple:  # a layer's, on most engines
            for leaf in value:
                if type(leaf) is not torch.Tensor:
                    break
            else:
                return tuple([self._view(leaf) for leaf in value])
        return map_leaves(value, self._view)

    def _copy(self, leaf: Any) -> Any:
        return self._view(leaf).clone() if isinstance(leaf, torch.Tensor) else leaf

    def _view(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.requires_grad:
            leaf = leaf.detach()
        start, count, total = self.rows
        # Indexing takes half the time of `narrow`.
        return leaf[start : start + count] if leaf.dim() and leaf.size(0) == total else leaf

    def marks(self, served: Any) -> list[tuple[Any, int]]:
        """Return each leaf with its version, to tell edited and replaced ones later."""
        return [
            (leaf, leaf._version if isinstance(leaf, torch.Tensor) else 0)
            for leaf in leaves(served)
        ]

    def check(self, value: Any, assigned: Any) -> None:
        """Raise `RowsError` where an assigned leaf does not fit this request's rows."""
        live, new = list(leaves(value)), list(leaves(assigned))
        if len(live) != len(new):
            _refuse(f"{len(new)} values were assigned where the model has {len(live)}")
        for old, leaf in zip(live, new, strict=True):
            if isinstance(old, torch.Tensor):
                self._check_leaf(old, leaf)
            elif old is not leaf and old != leaf:
                _refuse(f"{leaf!r} was assigned where the model has {old!r}")

    def _check_leaf(self, old: torch.Tensor, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor):
            _refuse(f"a {type(leaf).__name__} was assigned where the model has a tensor")
        wanted = list(old.shape)
        if self._is_rows(old):
            wanted[0] = self.rows.count
        if list(leaf.shape) != wanted:
            _refuse(f"shape {list(leaf.shape)} was assigned, and this request has {wanted}")
        if self._below is not None and leaf.numel():
            low, high = int(leaf.min()), int(leaf.max())
            if low < 0 or high >= self._below:
                _refuse(f"the token id {low if low < 0 else high} is not among {self._below} ids")

    def put(self, value: Any, served: Any, marks: list[tuple[Any, int]], *, assigned: bool) -> Any:
        """Write edited copies back into the live rows; give replaced leaves fresh tensors.

        An edit in place also lands where the live tensor is shared, as it does in plain torch;
        an assignment does not, so it never touches the live tensor itself.
        """
        new = list(leaves(served))
        if assigned:
            known: list[tuple[Any, int]] = [(None, 0)] * len(new)
        else:
            known = marks
            if all(
                leaf is old and not (isinstance(leaf, torch.Tensor) and leaf._version != version)
                for leaf, (old, version) in zip(new, known, strict=False)
            ) and len(new) == len(known):
                return value
            self.check(value, served)
        self.edits.append(True)
        self.has_put = True
        fresh = iter(zip(new, known, strict=True))
        return map_leaves(value, lambda leaf: self._put_leaf(leaf, *next(fresh)))

    def _put_leaf(self, live: Any, new: Any, mark: tuple[Any, int]) -> Any:
        if not isinstance(live, torch.Tensor):
            return live
        if new is mark[0] and new._version == mark[1]:
            return live
        if not self._is_rows(live):
            _refuse(f"a tensor of shape {list(live.shape)} has no rows of its own for this request")
        with torch.inference_mode(live.is_inference()), torch.no_grad():
            if new is not mark[0] or overlaps_itself(live):
                live = live.clone()
            live.narrow(0, self.rows.start, self.rows.count).copy_(new)
        return live


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements share memory (an expanded tensor), so that no write may land."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _refuse(
    what: str,
    why: str = "A block may write only the rows of its own request, in the shape it reads them.",
    todo: str = "Assign a value of the shape that a read of the same location gives.",
) -> None:
    raise RowsError(explain(what[:1].upper() + what[1:] + ".", why=why, todo=todo))
