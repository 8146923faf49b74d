"""What goes into a report in place of values, so that what was one object before is one at home.

An object that came with the block goes home as a word for it (`core.kept.FromHome`), and so does a
tensor or an array that shows the memory of one. A value of another stage goes as `Elsewhere`. A
container that stands in several places stays one.

Functions, sets and objects with attributes are no containers here: they are pickled as they are. So
what they hold is exchanged while it is written, by `Homeward.instead_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from nnsight_pp.core.kept import FromHome, Look
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.report import Elsewhere
from nnsight_pp.core.tree import SharedMap
from nnsight_pp.wire.shared_memory import span_of, span_of_array

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# One object, which pickle writes once for a whole report.
_ELSEWHERE = Elsewhere()
_TENSORS = (torch.Tensor, torch.nn.Parameter)
# These hold nothing else.
_SIMPLE = frozenset({
    int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
})  # fmt: skip


@final
class Homeward:
    """Turns the values of some blocks into what their reports hold of them, one after the other.

    Args:
        home: What came with the blocks, each with what stands for it. Kept alive.
        moved: The ids of those that show another memory now than they do at home.
    """

    def __init__(
        self, home: Iterable[tuple[FromHome, Any]] = (), moved: Collection[int] = ()
    ) -> None:
        # Apart from this object, which would hold itself.
        self._leaves = _Leaves(list(home), moved)
        self._map = SharedMap(self._leaves.changed, self._leaves.words)
        # By id: what goes as it is, though it shows what is at home.
        self._literal: dict[int, Any] = {}

    @property
    def is_deep(self) -> bool:
        """Whether something was met that is pickled as it is, and may hold other things."""
        return self._leaves.are_deep or self._map.has_others

    def __call__(self, value: Any) -> Any:
        """Return what a report holds of ``value``.

        Raises:
            HoldsItselfError: A container in it holds itself.
        """
        return self._map(value)

    def literal(self, value: Any) -> Any:
        """Return the elements of a tensor or an array, to be sent though it stands at home."""
        if value is None:
            return None
        shown = value.detach() if isinstance(value, torch.Tensor) else value.view()
        self._literal[id(shown)] = shown
        return shown

    def instead_of(self, obj: Any) -> Any:
        """Return what goes in place of ``obj``, inside of what is pickled as it is; or None."""
        kind = type(obj)
        if kind in _SIMPLE or id(obj) in self._literal:
            return None
        word = self._leaves.words.get(id(obj))
        if word is not None:
            return word
        if kind in _TENSORS or kind is np.ndarray:
            return self._leaves.look_of(obj)
        return None if issubclass(kind, tuple) else self._map.changed_of(obj)


@final
class _Leaves:
    """What a report holds of leaves."""

    def __init__(self, home: list[tuple[FromHome, Any]], moved: Collection[int]) -> None:
        self._home = [one for one in home if id(one[1]) not in moved]
        self._memory: _Memory | None = None
        self._all = home
        self.words = {id(one): word for word, one in home}
        self.are_deep = False

    def changed(self, leaf: Any) -> Any:
        kind = type(leaf)
        # CAUTION: a remote value answers `isinstance` by moving bytes.
        if issubclass(kind, RemoteValue):
            if not leaf._is_of_this_rank():
                return _ELSEWHERE
            leaf = leaf._real_value()
            kind = type(leaf)
        if kind in _SIMPLE:
            return leaf
        if kind in _TENSORS or kind is np.ndarray:
            return self.look_of(leaf) or leaf
        self.are_deep = True
        return leaf

    def look_of(self, shown: Any) -> FromHome | None:
        """Return the word for a tensor or an array that shows the memory of one from home."""
        if not self._home:
            return None
        if self._memory is None:
            self._memory = _Memory(self._home)
        return self._memory.look_of(shown)


@final
class _Memory:
    """The memory of the tensors and arrays that came from home."""

    def __init__(self, home: Iterable[tuple[FromHome, Any]]) -> None:
        spans = []
        for number, (word, one) in enumerate(home):
            span = _span(one)
            if span is not None:
                spans.append((span[0], -span[1], number, word))
        # Invariant: none lies in another, so both starts and ends grow.
        self._found: list[tuple[int, int, FromHome]] = []
        end = 0
        for start, minus_end, _, word in sorted(spans, key=lambda one: one[:3]):
            if -minus_end > end:
                end = -minus_end
                self._found.append((start, end, word))
        self._starts = [start for start, _, _ in self._found]

    def look_of(self, shown: Any) -> FromHome | None:
        """Return the word for ``shown``, or None where its memory is not one's from home."""
        if not self._found or (span := _span(shown)) is None:
            return None
        at = bisect_right(self._starts, span[0]) - 1
        if at < 0 or span[1] > self._found[at][1]:
            return None
        start, _, word = self._found[at]
        if isinstance(shown, torch.Tensor):
            look = Look(shown.dtype, tuple(shown.shape), shown.stride(), span[0] - start, True)
        else:
            first = shown.__array_interface__["data"][0]
            names = shown.dtype.descr if shown.dtype.names else shown.dtype.str
            is_writeable = bool(shown.flags.writeable)
            look = Look(names, shown.shape, shown.strides, first - start, is_writeable)
        return FromHome(word.trace, word.name, word.path, look)


def _span(one: Any) -> tuple[int, int] | None:
    """Return where the elements of a tensor or an array lie in this process, where they do."""
    kind = type(one)
    if kind is np.ndarray:
        span = None if one.dtype.hasobject else span_of_array(one)
    elif kind not in _TENSORS or one.layout != torch.strided or not one.is_cpu:
        return None
    else:
        span = None if one.is_conj() or one.is_neg() else span_of(one)
    return span if span is not None and span[1] > span[0] else None
