"""How a standard value stands in what a module takes or gives.

A lens here is three steps: a *pick* takes one tensor out of the module's value (and puts it back),
a *layout* turns that into one row per token of the prompt, and *columns* are the heads of a
projection. `Flat` is the layout of an engine; that of padded batches is `engines.hf.prompt_rows`.

Letters: T tokens of the prompt, H hidden size, N heads, D size of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch

from nnsight_pp.core.tree import children, rebuild
from nnsight_pp.errors import NotSupportedError, explain

if TYPE_CHECKING:
    from nnsight_pp.core.protocols import Cut


class Pick(Protocol):
    """Takes one tensor out of a value, and puts another one in its place."""

    def read(self, value: Any) -> tuple[torch.Tensor, bool]:
        """Return the tensor, and whether it is a new one, that no edit of it reaches ``value``."""
        ...

    def write(self, value: Any, tensor: torch.Tensor) -> Any: ...


class Layout(Protocol):
    """Turns a tensor of the model's own shape into one row per token, and back."""

    def read(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return the rows of the prompt's tokens ``[T, ...]``."""
        ...

    def write(self, tensor: torch.Tensor, rows: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return a new tensor like ``tensor`` with ``rows`` in it."""
        ...

    def read_last(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return the row of the prompt's last token ``[1, ...]``."""
        ...

    def write_last(self, tensor: torch.Tensor, row: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return a new tensor like ``tensor`` with ``row`` for the prompt's last token."""
        ...


@final
class Flat:
    """Rows of tokens, as an engine computes them."""

    __slots__ = ()

    def read(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return ``tensor``: it has a row for each token."""
        return tensor

    def write(self, tensor: torch.Tensor, rows: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return ``rows`` in the dtype and on the device of ``tensor``."""
        return rows.to(tensor)

    def read_last(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return the last row."""
        return tensor[-1:]

    def write_last(self, tensor: torch.Tensor, row: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return ``tensor`` with its last row replaced."""
        return torch.cat([tensor[:-1], row.to(tensor)])


class Columns(NamedTuple):
    """Some heads of a projection: columns ``[start, start + count * size)`` as ``[N, D]``."""

    start: int
    num_heads: int
    head_size: int
    # Of the whole projection; another width means that it is laid out in another way.
    width: int


@final
class StandardLens:
    """A pick, a layout, and the columns of some heads or all columns as they are.

    Args:
        pick: Which tensor.
        layout: How it becomes rows of tokens.
        columns: Which heads, or None.
        is_last: Whether only the prompt's last token is meant.
    """

    __slots__ = ("_columns", "_is_last", "_layout", "_pick")

    def __init__(
        self, pick: Pick, layout: Layout, columns: Columns | None = None, *, is_last: bool = False
    ) -> None:
        self._pick = pick
        self._layout = layout
        self._columns = columns
        self._is_last = is_last

    def read(self, share: Any, cut: Cut) -> torch.Tensor:
        """Return the tensor, fresh. See `core.lens.Lens`."""
        tensor, is_new = self._pick.read(share)
        read = self._layout.read_last if self._is_last else self._layout.read
        rows = read(tensor, cut)
        if self._columns is not None:
            start, count, size, width = self._columns
            _check_width(rows, width)
            rows = rows.narrow(-1, start, count * size).unflatten(-1, (count, size))
        return rows if is_new else rows.clone()

    def write(self, share: Any, tensor: torch.Tensor, cut: Cut) -> Any:
        """Return ``share`` with ``tensor`` in it. See `core.lens.Lens`."""
        old, _ = self._pick.read(share)
        if self._columns is not None:
            start, count, size, _ = self._columns
            rows = self._layout.read(old, cut)
            left, right = rows[..., :start], rows[..., start + count * size :]
            tensor = torch.cat([left, tensor.flatten(-2).to(rows), right], -1)
        write = self._layout.write_last if self._is_last else self._layout.write
        return self._pick.write(share, write(old, tensor, cut))


def _check_width(rows: torch.Tensor, width: int) -> None:
    if rows.shape[-1] != width:
        raise NotSupportedError(
            explain(
                f"A projection of attention gives {rows.shape[-1]} columns, not {width}.",
                why="Its heads are not laid out as the model's configuration says.",
                todo="Use the `.output` and `.input` of the model's own modules.",
            )
        )


# -- picks --------------------------------------------------------------------------------------


@final
class First:
    """The value itself, or the first of several."""

    __slots__ = ()

    def read(self, value: Any) -> tuple[torch.Tensor, bool]:
        """Return the tensor."""
        parts = children(value)
        return value if parts is None else parts[0], False

    def write(self, value: Any, tensor: torch.Tensor) -> Any:
        """Return ``value`` with ``tensor`` as its first part."""
        parts = children(value)
        return tensor if parts is None else rebuild(value, [tensor, *parts[1:]])


@final
class Pair:
    """A stream that is kept as ``(hidden, residual)``: their sum.

    Where the sum is changed, the new one stands in ``hidden`` and ``residual`` is zero, so that
    it comes out exactly; rows that are as they were keep their two parts.
    """

    __slots__ = ()

    def read(self, value: Any) -> tuple[torch.Tensor, bool]:
        """Return the sum of the two parts."""
        return _sum(*value), True

    def write(self, value: Any, tensor: torch.Tensor) -> Any:
        """Return the pair of which ``tensor`` is the sum."""
        hidden, residual = value
        return rebuild(value, _split(hidden, residual, tensor))


def _sum(hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    if hidden.shape != residual.shape:
        raise NotSupportedError(
            explain(
                f"A stream is kept in parts of shape {list(hidden.shape)} and "
                f"{list(residual.shape)}.",
                why="Only parts of one shape add up to it; a part may be split over ranks.",
                todo="Use the `.output` and `.input` of the model's own modules.",
            )
        )
    return hidden + residual


def _split(hidden: torch.Tensor, residual: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
    is_same = (_sum(hidden, residual) == new).all(-1, keepdim=True)
    zeros = torch.zeros_like(residual)
    return [torch.where(is_same, hidden, new), torch.where(is_same, residual, zeros)]


@final
class Input:
    """One argument of a module's call, ``(args, kwargs)``; where it is given, plus a second one.

    Args:
        index: The place of the argument among the positional ones.
        name: Its name, where it is given by name.
        second: The same of the other part of a stream that is kept apart.
    """

    __slots__ = ("_first", "_second")

    def __init__(self, index: int, name: str, second: tuple[int, str] | None = None) -> None:
        self._first = (index, name)
        self._second = second

    def read(self, value: Any) -> tuple[torch.Tensor, bool]:
        """Return the argument, or the sum of the two."""
        hidden = _argument(value, self._first)
        residual = None if self._second is None else _argument(value, self._second)
        return (hidden, False) if residual is None else (_sum(hidden, residual), True)

    def write(self, value: Any, tensor: torch.Tensor) -> Any:
        """Return the call's arguments with ``tensor`` for what a read gives."""
        residual = None if self._second is None else _argument(value, self._second)
        if self._second is None or residual is None:
            return _with_argument(value, self._first, tensor)
        hidden, zeros = _split(_argument(value, self._first), residual, tensor)
        return _with_argument(_with_argument(value, self._first, hidden), self._second, zeros)


def _argument(value: Any, which: tuple[int, str]) -> Any:
    args, kwargs = value
    index, name = which
    return args[index] if index < len(args) else kwargs.get(name)


def _with_argument(value: Any, which: tuple[int, str], new: Any) -> Any:
    args, kwargs = value
    index, name = which
    if index < len(args):
        return (*args[:index], new, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: new}


@final
class Logits:
    """The logits in what a whole language model returns."""

    __slots__ = ()

    def _index(self, value: Any) -> int:
        if isinstance(value, dict):
            return list(value).index("logits")
        # A loss may stand before them.
        return next(i for i, part in enumerate(value) if part.dim() == 3)

    def read(self, value: Any) -> tuple[torch.Tensor, bool]:
        """Return the logits of every position."""
        parts = children(value)
        return value if parts is None else parts[self._index(value)], False

    def write(self, value: Any, tensor: torch.Tensor) -> Any:
        """Return ``value`` with ``tensor`` for the logits."""
        parts = children(value)
        if parts is None:
            return tensor
        parts[self._index(value)] = tensor
        return rebuild(value, parts)
