"""The value behind a lazy proxy: the owner's answer, and the edits that the block has made since.

A `Tree` is the value of one ask as the block sees it. Until a line needs its data it is a list of
edits; then the answer is pulled, copied, and the edits are replayed on the copy, in order. What an
edit uses is frozen when the edit is made, so a replay gives what the owner's own tensor holds.

Note [Parts never escape]
    As long as there is no edit, a part of the value may be pulled on its own. It is only ever
    computed with: whoever could edit it, or would hand out something that shares its memory, takes
    the whole value first. So an edit may simply forget the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from nnsight_pp.core.location import Visit
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import copied, leaves, map_leaves, own_copy
from nnsight_pp.errors import NotSupportedError, explain
from nnsight_pp.parallel.reductions import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.location import Location

# An edit: indices of the edited part, the function, its arguments (frozen at the edit).
_Edit = tuple[tuple[Any, ...], "Callable[..., Any]", tuple[Any, ...], dict[str, Any]]
FIRST_INPUT = "first input of (args, kwargs)"
# Edits that draw random numbers, or run a function of the block that may.
DRAWING = frozenset(
    [
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    ]
) | {"apply_", "map_"}


class Source(Protocol):
    """The ask behind a lazy value."""

    @property
    def visit(self) -> Visit:
        """What was asked for."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether this rank is the one that has the value."""
        ...

    @property
    def sums_alike(self) -> bool:
        """Whether a sum by the owner's link has the bits of one by the owner's worker."""
        ...

    @property
    def casts_copy(self) -> bool:
        """Whether the value has more than two bytes a number, so that a cast to two is a copy."""
        ...

    @property
    def shard(self) -> Source | None:
        """What a tensor-parallel rank holds of a weight. None: this is not a weight."""
        ...

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """Return the owner's answer with ``picks`` applied."""
        ...

    def echo(self, error: Exception) -> None:
        """Note an error of a deferred index or edit: the owner raised it where the line stands."""
        ...


def pick(value: Any, picks: Sequence[Any]) -> Any:
    """Return what ``picks`` make of ``value``, outermost first: indices and reductions.

    The owner of a value applies them before it sends.
    """
    for step in picks:
        if type(step) is Reduction:
            value = step.of(value)
        elif isinstance(step, str) and step == FIRST_INPUT:
            value = first_of(*value)
        else:
            value = value[step]
    return value


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first positional argument, else the first named one."""
    return args[0] if args else next(iter(kwargs.values()))


def with_first(value: Any, first: Any) -> Any:
    """Return ``value = (args, kwargs)`` with its first argument replaced."""
    args, kwargs = value
    if args:
        return (first, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): first}


@final
class OwnConstant:
    """The source of a weight that this rank has. A block gets it as it gets another rank's."""

    __slots__ = ("_value", "visit")

    is_here = True
    sums_alike = True
    casts_copy = False

    def __init__(self, location: Location, value: Any) -> None:
        self.visit = Visit(location, 0)
        self._value = value

    @property
    def shard(self) -> Source:
        """The weight: nobody else has a part of it."""
        return self

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """Return the weight with ``picks`` applied. It is never edited: trees copy it first."""
        return pick(self._value, picks)

    def echo(self, error: Exception) -> None:
        """Nothing to note: the error is raised where the line stands."""


class Pulled:
    """The owner's answer to one ask, shared by every tree that was frozen from another.

    What it returns is never edited: a tree copies it first.

    Args:
        source: The ask.
        made_by: What the owner makes of its answer; this is the result.
    """

    __slots__ = ("_is_here", "_parts", "_source", "_value", "made_by")

    def __init__(self, source: Source, made_by: tuple[Any, ...] = ()) -> None:
        self._source = source
        self.made_by = made_by
        self._value: Any = None
        self._is_here = False
        # Parts pulled on their own, by the printed form of their picks.
        self._parts: dict[str, Any] = {}

    @property
    def visit(self) -> Visit:
        """What was asked for."""
        return self._source.visit

    @property
    def source(self) -> Source:
        """The ask behind it."""
        return self._source

    @property
    def is_of_this_rank(self) -> bool:
        """Whether this rank has the value itself: a weight of its own."""
        return self._source.is_here

    def made(self, steps: tuple[Any, ...]) -> Pulled:
        """Return what the owner makes of this by ``steps``, as an answer of its own."""
        return Pulled(self._source, (*self.made_by, *steps))

    def echo(self, error: Exception) -> None:
        """See `Source`."""
        self._source.echo(error)

    def whole(self, *, in_torch: bool) -> Any:
        """Return the whole answer; it is pulled once."""
        if not self._is_here:
            self._value = self._source.pull(self.made_by, in_torch=in_torch)
            self._is_here = True
            self._parts.clear()
        return self._value

    def part(self, picks: Sequence[Any], *, in_torch: bool) -> Any:
        """Return only what ``picks`` name, without pulling the rest."""
        if self._is_here:
            return pick(self._value, picks)
        key = repr(picks)
        if key not in self._parts:
            self._parts[key] = self._source.pull((*self.made_by, *picks), in_torch=in_torch)
        return self._parts[key]


@final
class Tree:
    """The value of one ask as the block sees it: the answer, and the edits since.

    Args:
        pulled: The answer.
        edits: Those made so far.
        refusal: Makes the error for an edit, where the value is shared. An edit through a view of
            it, which nothing here sees, torch itself refuses: it is an inference tensor.
    """

    __slots__ = ("_edits", "_first", "_parts", "_refusal", "_value", "is_here", "pulled")

    def __init__(
        self,
        pulled: Pulled,
        edits: Sequence[_Edit] = (),
        refusal: Callable[[], Exception] | None = None,
    ) -> None:
        self.pulled = pulled
        self._refusal = refusal
        # Invariant: once `is_here`, every edit is made on `_value` at once; `_edits` stays empty.
        self._edits = list(edits)
        self._value: Any = None
        self.is_here = False
        # Copies of parts; see Note [Parts never escape].
        self._parts: dict[str, Any] = {}
        # What the block assigned as the first argument, in a tuple: read again, the same object.
        self._first: tuple[Any, ...] = ()

    @property
    def first(self) -> tuple[Any, ...]:
        """A tuple of what was assigned as the first argument of this call, or an empty one."""
        return self._first

    def is_left_with_owner(self, picks: tuple[Any, ...]) -> bool:
        """Whether the part that ``picks`` name is still as the owner answered it, and not here."""
        is_changed = self._edits or self._first
        is_here = self.is_here or self.pulled.is_of_this_rank or repr(picks) in self._parts
        return not (is_changed or is_here)

    def is_edited(self) -> bool:
        """Whether the block has edited the value in place, also through a view of it."""
        if self._edits or self._first:
            return True
        return self.is_here and not _are_alike(self._value, self.pulled.whole(in_torch=False))

    def whole(self, *, in_torch: bool) -> Any:
        """Return the value with its edits, pulling and replaying on first use."""
        if not self.is_here:
            answer = self.pulled.whole(in_torch=in_torch)
            value = copied(answer) if self._refusal is None else _sealed(answer)
            for picks, function, args, kwargs in self._edits:
                real_args, real_kwargs = real(args, in_torch), real(kwargs, in_torch)
                try:
                    _edit_in_place(pick(value, picks), function, real_args, real_kwargs)
                except Exception as error:
                    self.pulled.echo(error)
                    raise
            if self._first:
                value = with_first(value, _real_object(self._first[0]))
            self._set(value)
        return self._value

    def check_may_edit(self) -> None:
        """Raise where this is a value that others use as well; on every rank alike."""
        if self._refusal is not None:
            raise self._refusal()

    def of_shard(self) -> Tree | None:
        """Return the tree of what this rank holds, where this is a weight that others use too."""
        shard = self.pulled.source.shard
        return Tree(Pulled(shard), (), self._refusal) if self._refusal and shard else None

    def part(self, picks: tuple[Any, ...], *, in_torch: bool) -> Any:
        """Return the part that ``picks`` name; pull no more than that where it is enough."""
        if self.is_here or self._edits or self._first or not picks:
            value = self.whole(in_torch=in_torch)
            try:
                return pick(value, picks)
            except Exception as error:
                self.pulled.echo(error)
                raise
        key = repr(picks)
        if key not in self._parts:
            part = self.pulled.part(picks, in_torch=in_torch)
            self._parts[key] = copied(part)
        return self._parts[key]

    def edit(
        self,
        picks: tuple[Any, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make an edit in place on the part that ``picks`` name, now or when it is forced.

        Returns:
            What stands for the part from now on, where that is not the part itself: a number that
            is changed by ``+=`` becomes another one. Else `NotImplemented`.
        """
        self.check_may_edit()
        # What was assigned is an object of the block's own; numbers must be drawn in the order of
        # the lines, as on the owner; what this rank ships must be whole when its block is over.
        if self._first or function.__name__ in DRAWING or self.pulled.is_of_this_rank:
            self.whole(in_torch=False)
        if not self.is_here:
            self._parts.clear()
            self._edits.append((picks, function, frozen(args), frozen(kwargs)))
            return NotImplemented
        target = pick(self._value, picks)
        real_args, real_kwargs = real(args, False), real(kwargs, False)
        if _is_operator(function) and not isinstance(target, torch.Tensor):
            return function(target, *real_args, **real_kwargs)
        _edit_in_place(target, function, real_args, real_kwargs)
        return NotImplemented

    def frozen(self) -> Tree:
        """Return a tree of the block's own that stays as this one is now."""
        copy = Tree(self.pulled, self._edits)
        if self._first:
            self.whole(in_torch=False)
        if self.is_here:
            copy._set(copied(self._value))
        return copy

    def replaced_first(self, first: Any) -> Tree:
        """Return a tree of this value as it is now, with its first argument replaced."""
        copy = Tree(self.pulled, self._edits)
        if self.is_here:
            copy._set(with_first(self._value, _real_object(first)))
        copy._first = (first,)
        return copy

    def _set(self, value: Any) -> None:
        self._value = value
        self.is_here = True
        self._edits.clear()
        self._parts.clear()


def _sealed(value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return value.clone()


def _are_alike(value: Any, answer: Any) -> bool:
    return all(
        not isinstance(one, torch.Tensor)
        or bool(((one == two) | ((one != one) & (two != two))).all())
        for one, two in zip(leaves(value), leaves(answer), strict=True)
    )


def frozen(value: Any) -> Any:
    """Return ``value`` as it is now, so that later edits of it do not reach a recorded edit."""
    return map_leaves(
        value,
        lambda leaf: leaf._frozen() if issubclass(type(leaf), RemoteValue) else own_copy(leaf),
    )


def real(value: Any, in_torch: bool) -> Any:
    """Return ``value`` with every lazy leaf forced."""
    return map_leaves(
        value, lambda leaf: leaf._force(in_torch) if issubclass(type(leaf), RemoteValue) else leaf
    )


def _real_object(value: Any) -> Any:
    """Return ``value`` with every lazy leaf replaced by the one object that it stands for."""
    return map_leaves(
        value, lambda leaf: leaf._real_value() if issubclass(type(leaf), RemoteValue) else leaf
    )


def _is_operator(function: Callable[..., Any]) -> bool:
    """Tell whether ``function`` is one of ``operator.iadd`` and its like."""
    name = getattr(function, "__name__", "")
    return function.__module__ == "_operator" and name.startswith("i")


def _edit_in_place(
    target: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if not isinstance(target, torch.Tensor) and (
        isinstance(target, (list, dict)) or _is_operator(function)
    ):
        kind = type(target).__name__
        raise NotSupportedError(
            explain(
                f"A {kind} of another stage was edited in place.",
                why="Only tensors of another stage can be: other names may hold what is inside it.",
                todo="Edit the tensors in it, or build a new one.",
            )
        )
    function(target, *args, **kwargs)
