"""`LazyRemoteTensor`: stands in a block for a value that another stage computes.

Making one, indexing it, reducing it, cloning it, saving it, passing it around and editing it in
place move no bytes. A line that needs data *forces* it: the value is pulled from its owner, with
plain indices and reductions applied there, and kept. Edits in place are recorded and replayed in
order on the pulled value; every rank runs the same edit line, so the replay gives what the owner's
own tensor holds.

A proxy is a tree (`parallel.pulled`: the answer and its edits) and a list of indices into it.

Note [Views of a forced value]
    `lazy[0][-1]` is pulled as one row. When a torch call gives back a view of that row, an edit
    through the view would not reach the tree. So when a result shares memory with such a row, or
    could be edited through, the whole value is pulled and the call made on a view of it.

Note [Deferred errors]
    What is deferred raises late on the ranks that do not own the value. Where the code around the
    line would handle the error (`parallel.guarded`), nothing is deferred.
"""

from __future__ import annotations

import copy
import operator
import sys
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_pp.core.saved import save
from nnsight_pp.core.tree import leaves, own_copy
from nnsight_pp.errors import STAND_IN, OutsideTraceError
from nnsight_pp.parallel.class_check import (
    MatchedAsSequence,
    is_asked_by_python,
    is_sequence,
    length_that_does_not_match,
)
from nnsight_pp.parallel.guarded import is_guarded
from nnsight_pp.parallel.operators import edited_by, give_operators, is_plain
from nnsight_pp.parallel.pulled import (
    FIRST_INPUT,
    Pulled,
    Source,
    Tree,
    first_of,
    pick,
    real,
    with_first,
)
from nnsight_pp.parallel.reductions import Reduction, is_reducing_call, reduction
from nnsight_pp.parallel.stand_in import StandIn, method_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["LazyRemoteTensor", "Source", "first_input", "pick", "with_first_input"]

# Not containers, and not views of anything.
_PLAIN_VALUE = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, type(None))
# Methods whose result shares memory in a way that only they know.
_DUNDERS = frozenset({"__dlpack__", "__dlpack_device__"})
_EXPORTS = _DUNDERS | {"numpy", "untyped_storage", "storage", "data_ptr"}


def first_input(inputs: Any) -> Any:
    """Return the first positional argument of ``inputs = (args, kwargs)``, else the first named.

    Moves nothing when ``inputs`` is a lazy value.
    """
    if not _is_lazy(inputs):
        return first_of(*inputs)
    assigned = inputs._tree.first
    return assigned[0] if assigned and not inputs._picks else inputs._child(FIRST_INPUT)


def with_first_input(inputs: Any, first: Any) -> Any:
    """Return ``inputs = (args, kwargs)`` with its first argument replaced; moves nothing."""
    if not _is_lazy(inputs):
        return with_first(inputs, first)
    return LazyRemoteTensor._of(inputs._tree.replaced_first(first), inputs._picks)


def _is_lazy(value: object) -> bool:
    return issubclass(type(value), LazyRemoteTensor)


class LazyRemoteTensor(StandIn):
    """A value that another stage computes. Use it like the value itself.

    See the module's text for what moves bytes and what does not. Outside of its block its ``repr``
    tells what was asked for. A weight's has ``.local``: what this tensor-parallel rank holds of it.
    """

    __slots__ = ("_picks", "_tree")

    # As torch.Tensor: a numpy array on the left of an operator leaves it to the right one.
    __array_priority__ = 1000

    _tree: Tree
    _picks: tuple[Any, ...]

    def __init__(self, source: Source, refusal: Callable[[], Exception] | None = None) -> None:
        object.__setattr__(self, "_tree", Tree(Pulled(source), (), refusal))
        object.__setattr__(self, "_picks", ())

    @classmethod
    def _of(cls, tree: Tree, picks: tuple[Any, ...]) -> LazyRemoteTensor:
        proxy = object.__new__(cls)
        object.__setattr__(proxy, "_tree", tree)
        object.__setattr__(proxy, "_picks", picks)
        return proxy

    def _child(self, step: Any) -> LazyRemoteTensor:
        return LazyRemoteTensor._of(self._tree, (*self._picks, step))

    def _force(self, in_torch: bool = False) -> Any:
        return self._tree.part(self._picks, in_torch=in_torch)

    def _frozen(self) -> Any:
        """Return this value as it is now, whatever is edited later."""
        if self._tree.is_here:
            return own_copy(self._force())
        return self._clone()

    def _clone(self, **_: Any) -> LazyRemoteTensor:
        return LazyRemoteTensor._of(self._tree.frozen(), self._picks)

    def _is(self, other: Any) -> bool:
        value = self._force()
        if not _is_lazy(other):
            return value is other
        if other._tree is not self._tree or other._picks != self._picks:
            return (value is None or isinstance(value, bool)) and value is other._force()
        if not self._picks:
            return isinstance(value, tuple)  # `copy.copy` gives others anew
        holder = self._tree.part(self._picks[:-1], in_torch=False)
        return not isinstance(holder, torch.Tensor)  # which gives a new view each time

    def _real_value(self) -> Any:
        """Return the value itself; edits of it reach this proxy."""
        self._tree.whole(in_torch=False)
        return self._force()

    def _is_of_this_rank(self) -> bool:
        """Whether this rank has the value itself, and ships it."""
        return self._tree.pulled.is_of_this_rank

    def _is_edited(self) -> bool:
        return self._tree.is_edited()

    def _is_left_with_owner(self) -> bool:
        return self._tree.is_left_with_owner(self._picks)

    # -- what moves nothing ----------------------------------------------------------------------

    def save(self) -> LazyRemoteTensor:
        """Mark this value to be returned from the trace; its owner ships it."""
        return save(self)

    def __getitem__(self, index: Any) -> Any:
        if is_plain(index):
            if is_guarded():
                # The whole: an error of its owner's would be of another class.
                pick(self._tree.whole(in_torch=False), (*self._picks, index))
            return self._child(index)
        return _call(operator.getitem, (self, index), {}, in_torch=False)

    def __setitem__(self, index: Any, value: Any) -> None:
        if (
            _is_lazy(value)
            and value._tree is self._tree
            and repr(value._picks) == repr((*self._picks, index))
        ):
            # `x[i] += v` writes back what was already edited in place; a tuple refuses that.
            if is_guarded() and not isinstance(whole := self._force(), torch.Tensor):
                operator.setitem(whole, index, whole[index])
            return
        self._edit(operator.setitem, (index, value), {})

    def _edit(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Edit in place: recorded, or made at once under Note [Deferred errors]."""
        if is_guarded():
            self._tree.whole(in_torch=False)
        return self._tree.edit(self._picks, function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _DUNDERS:
            raise AttributeError(name)
        if name == "local" and not self._picks and (shard := self._tree.of_shard()) is not None:
            return LazyRemoteTensor._of(shard, ())
        if name in ("clone", "backward"):  # the latter looks at the line that calls it
            return self._clone if name == "clone" else self._force().backward
        if name.endswith("_") and not name.endswith("__"):
            return _Edited(self, name)
        if is_reducing_call(name, sys._getframe(1)) and self._is_left_with_owner():
            return _Method(self, name)
        value = _call(getattr, (self, name), {}, in_torch=False)
        if callable(value) and not isinstance(value, torch.Tensor):
            return _Method(self, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._edit(setattr, (name, value), {})

    # -- what needs data -------------------------------------------------------------------------

    def __repr__(self) -> str:
        try:
            return repr(self._force())  # as on the owner: no rank may see another text
        except OutsideTraceError:
            shown = "".join(map(_shown, (*self._tree.pulled.made_by, *self._picks)))
            return f"<LazyRemoteTensor {self._tree.pulled.visit}{shown}>"

    @property
    def __class__(self) -> type:
        # CAUTION: C++ that is told "a tensor" here reads this object as one, and crashes.
        is_python = is_asked_by_python(sys._getframe(1))
        return type(self._force()) if is_python else LazyRemoteTensor

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a remote value cannot be changed")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(function, args, kwargs or {}, in_torch=True)

    def __iter__(self) -> Iterator[Any]:
        value = self._force()
        if isinstance(value, torch.Tensor):
            return iter([self._child(index) for index in range(len(value))])
        if isinstance(value, (list, tuple)):
            # Nothing edits None, and functions that a block calls ask `item is None`.
            return iter(
                [None if part is None else self._child(at) for at, part in enumerate(value)]
            )
        return iter(self._real_value())

    def __len__(self) -> int:
        value = self._force()
        if not is_sequence(value):
            unmatched = length_that_does_not_match(sys._getframe(1))
            if unmatched is not None:
                return unmatched
        if type(value) is torch.Tensor and not value.dim():
            error = TypeError("len() of a 0-d tensor")
            error.add_note(STAND_IN)  # `torch.tensor([value, ...])` asks so too
            raise error
        return len(value)

    def __copy__(self) -> LazyRemoteTensor:
        return LazyRemoteTensor._of(self._tree, self._picks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Parts that share memory share it in the copy, as torch's do.
        tree = self._tree
        if tree.is_here and not tree.pulled.is_of_this_rank:
            return copy.deepcopy(self._force(), memo)  # real views of it may be copied along
        if id(tree) not in memo:
            memo[id(tree)] = tree.frozen()
        return LazyRemoteTensor._of(memo[id(tree)], self._picks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real_value()(*real(args, False), **real(kwargs, False))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self._real_value()
        array = value.__array__() if dtype is None else value.__array__(dtype)
        return array.copy() if copy else array

    def __array_wrap__(self, array: Any, *args: Any) -> Any:
        value = self._force()
        return value.__array_wrap__(array) if isinstance(value, torch.Tensor) else array


class _Edited:
    """A method that edits in place (`add_`, `zero_`, ...): recorded, and returns its proxy."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: LazyRemoteTensor, name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> LazyRemoteTensor:
        self._proxy._edit(method_of(self._name), args, kwargs)
        return self._proxy


class _Method:
    """A method of the value: called on the real one, its lazy arguments forced."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: LazyRemoteTensor, name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name in _EXPORTS:
            self._proxy._real_value()
        return _call(method_of(self._name), (self._proxy, *args), kwargs, in_torch=False)


def _reduced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LazyRemoteTensor | None:
    """Return what the owner is to compute of this call, as a value of its own, or None."""
    if not (args and _is_lazy(args[0]) and args[0]._is_left_with_owner()):
        return None
    value = args[0]
    pulled = value._tree.pulled
    source = pulled.source
    casts_copy = source.casts_copy and not pulled.made_by
    step = reduction(
        function, args[1:], kwargs, sums_alike=source.sums_alike, casts_copy=casts_copy
    )
    if step is None or is_guarded():
        return None
    return LazyRemoteTensor._of(Tree(pulled.made((*value._picks, step))), ())


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, in_torch: bool
) -> Any:
    """Call ``function`` with every lazy argument forced; see Note [Views of a forced value].

    A call that makes one value smaller is left to its owner.
    """
    reduced = _reduced(function, args, kwargs)
    if reduced is not None:
        return reduced
    for proxy in _lazy_leaves(edited_by(function, args, kwargs)):
        proxy._tree.check_may_edit()
        proxy._tree.whole(in_torch=in_torch)
    proxies = _lazy_leaves((args, kwargs))
    loose = [proxy for proxy in proxies if not proxy._tree.is_here]
    for proxy in loose:
        if not isinstance(proxy._force(in_torch), _PLAIN_VALUE):
            proxy._tree.whole(in_torch=in_torch)  # what is inside a container may be edited
    result = function(*real(args, in_torch), **real(kwargs, in_torch))
    loose = [proxy for proxy in loose if not proxy._tree.is_here]
    if loose and _shares_memory(result, [proxy._force(in_torch) for proxy in loose]):
        for proxy in loose:
            proxy._tree.whole(in_torch=in_torch)
        result = function(*real(args, in_torch), **real(kwargs, in_torch))
    return result


def _lazy_leaves(value: Any) -> list[LazyRemoteTensor]:
    return [cast("LazyRemoteTensor", leaf) for leaf in leaves(value) if _is_lazy(leaf)]


def _shares_memory(result: Any, parts: list[Any]) -> bool:
    held = {_storage(leaf) for leaf in leaves(parts)} - {None}
    try:
        return any(_storage(leaf) in held for leaf in leaves(result))
    except NotImplementedError:  # within `torch.func` no result tells its memory
        return True


def _storage(leaf: Any) -> int | None:
    if not issubclass(type(leaf), torch.Tensor) or leaf.device.type == "meta":
        return None
    return leaf.untyped_storage().data_ptr() or None if leaf.layout == torch.strided else None


def _shown(step: Any) -> str:
    if type(step) is Reduction:
        return repr(step)
    return ".first" if isinstance(step, str) and step == FIRST_INPUT else f"[{step!r}]"


give_operators(LazyRemoteTensor, _call)
MatchedAsSequence.register(LazyRemoteTensor)
