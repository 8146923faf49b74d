"""`LazyRemoteTensor`: stands in a block for a value that another stage computes.

Making one, indexing it, cloning it, saving it, passing it around and editing it in place move no
bytes. A line that needs data *forces* it: the value is pulled from its owner, with plain indices
applied there, and kept. Edits in place are recorded and replayed in order on the pulled value;
every rank runs the same edit line, so the replay gives what the owner's own tensor holds.

One `_Tree` holds the pulled value and the edits of one ask; a proxy is a tree and a list of
indices into it. Note [Views of a forced value] tells when a small pull is not enough.

Note [Views of a forced value]
    `lazy[0][-1]` is pulled as one row. When a torch call gives back a view of that row, an edit
    through the view would not reach the tree. So when a result shares memory with such a row, the
    whole value is pulled and the call repeated on a view of it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import torch

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.saved import save
from nnsight_pp.core.tree import leaves, map_leaves
from nnsight_pp.errors import NotSupportedError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nnsight_pp.core.location import Visit

# An edit: indices of the edited part, the function, its arguments (frozen at the edit). Without
# indices (None) the function returns what the whole value is replaced by.
_Edit = tuple[tuple[Any, ...] | None, "Callable[..., Any]", tuple[Any, ...], dict[str, Any]]
_PLAIN_INDEX = (int, slice, str, type(None), type(Ellipsis))
FIRST_INPUT = "first input of (args, kwargs)"


class Source(Protocol):
    """The ask behind a lazy value."""

    @property
    def visit(self) -> Visit:
        """What was asked for."""
        ...

    def pull(self, picks: Sequence[Any] = (), *, in_torch: bool = False) -> Any:
        """Return the owner's answer with ``picks`` applied."""
        ...


def pick(value: Any, picks: Sequence[Any]) -> Any:
    """Return the part of ``value`` that ``picks`` name, outermost first.

    The owner of a value applies them before it sends.
    """
    for step in picks:
        if isinstance(step, str) and step == FIRST_INPUT:
            value = _first(*value)
        else:
            value = value[step]
    return value


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _with_first(value: Any, first: Any) -> Any:
    args, kwargs = value
    if args:
        return (first, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): first}


def first_input(inputs: Any) -> Any:
    """Return the first positional argument of ``inputs = (args, kwargs)``, else the first named.

    Moves nothing when ``inputs`` is a lazy value.
    """
    return inputs._child(FIRST_INPUT) if _is_lazy(inputs) else _first(*inputs)


def with_first_input(inputs: Any, first: Any) -> Any:
    """Return ``inputs = (args, kwargs)`` with its first argument replaced; moves nothing."""
    return inputs._replaced(_with_first, first) if _is_lazy(inputs) else _with_first(inputs, first)


class _Pulled:
    """The owner's answer to one ask, shared by every tree that was frozen from another."""

    __slots__ = ("_source", "_value", "is_here")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._value: Any = None
        self.is_here = False

    @property
    def visit(self) -> Visit:
        return self._source.visit

    def whole(self, *, in_torch: bool) -> Any:
        """Return the whole answer. It is never edited: a tree copies it first."""
        if not self.is_here:
            self._value = self._source.pull((), in_torch=in_torch)
            self.is_here = True
        return self._value

    def part(self, picks: Sequence[Any], *, in_torch: bool) -> Any:
        """Return only what ``picks`` name, without pulling the rest."""
        if self.is_here:
            return pick(self._value, picks)
        return self._source.pull(picks, in_torch=in_torch)


@final
class _Tree:
    """The value of one ask as the block sees it: the answer, and the edits since."""

    __slots__ = ("_parts", "edits", "pulled", "value")

    def __init__(self, pulled: _Pulled, edits: list[_Edit] | None = None) -> None:
        self.pulled = pulled
        self.edits: list[_Edit] = edits or []
        # Invariant: once set, every edit is made on `value` at once and `edits` stays empty.
        self.value: Any = None
        # Parts pulled on their own, by their picks. Invariant: empty once there is an edit.
        self._parts: dict[Any, Any] = {}

    @property
    def is_here(self) -> bool:
        return self.value is not None

    def whole(self, *, in_torch: bool) -> Any:
        """Return the value with its edits, pulling and replaying on first use."""
        if self.value is None:
            answer = self.pulled.whole(in_torch=in_torch)
            value = map_leaves(answer, _own_copy)
            for picks, function, args, kwargs in self.edits:
                real_args, real_kwargs = _real(args, in_torch), _real(kwargs, in_torch)
                if picks is None:
                    value = function(value, *real_args, **real_kwargs)
                else:
                    _edit_in_place(pick(value, picks), function, real_args, real_kwargs)
            self.edits = []
            self.value = value
            self._parts.clear()
        return self.value

    def part(self, picks: tuple[Any, ...], *, in_torch: bool) -> Any:
        """Return the part that ``picks`` name; pull no more than that where it is enough."""
        if self.value is None and not self.edits and picks:
            key = repr(picks)
            if key not in self._parts:
                part = self.pulled.part(picks, in_torch=in_torch)
                self._parts[key] = map_leaves(part, _own_copy)
            return self._parts[key]
        return pick(self.whole(in_torch=in_torch), picks)

    def edit(
        self,
        picks: tuple[Any, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Make an edit in place on the part that ``picks`` name, now or when it is forced."""
        if self.value is None and self._parts:
            self.whole(in_torch=False)  # a part was handed out: it must see the edit too
        if self.value is not None:
            target = pick(self.value, picks)
            _edit_in_place(target, function, _real(args, False), _real(kwargs, False))
        else:
            self.edits.append((picks, function, _frozen(args), _frozen(kwargs)))

    def frozen(self) -> _Tree:
        """Return a tree that stays as this one is now."""
        if self.value is not None:
            copy = _Tree(self.pulled)
            copy.value = map_leaves(self.value, _own_copy)
            return copy
        return _Tree(self.pulled, list(self.edits))


def _edit_in_place(
    target: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    result = function(target, *args, **kwargs)
    if getattr(function, "__name__", "").startswith("i") and result is not target:
        kind = type(target).__name__
        raise NotSupportedError(
            explain(
                f"A {kind} of another stage was changed by an operator like `x += y`.",
                why=f"A {kind} cannot be edited in place, and every name that holds it would see "
                "the change.",
                todo="Write `x = x + y`.",
            )
        )


def _own_copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _is_lazy(value: object) -> bool:
    return issubclass(type(value), LazyRemoteTensor)


def _frozen(value: Any) -> Any:
    """Return ``value`` as it is now, so that later edits of it do not reach a recorded edit."""

    def freeze(leaf: Any) -> Any:
        if _is_lazy(leaf):
            proxy = cast("LazyRemoteTensor", leaf)
            return LazyRemoteTensor._of(proxy._tree.frozen(), proxy._picks)
        return _own_copy(leaf)

    return map_leaves(value, freeze)


def _real(value: Any, in_torch: bool) -> Any:
    """Return ``value`` with every lazy leaf forced."""
    return map_leaves(value, lambda leaf: leaf._force(in_torch) if _is_lazy(leaf) else leaf)


class LazyRemoteTensor(RemoteValue):
    """A value that another stage computes. Use it like the value itself.

    See the module's text for what moves bytes and what does not. Which stage owns it, and what
    was asked for, is in its ``repr``.
    """

    __slots__ = ("_picks", "_tree")

    _tree: _Tree
    _picks: tuple[Any, ...]

    def __init__(self, source: Source) -> None:
        object.__setattr__(self, "_tree", _Tree(_Pulled(source)))
        object.__setattr__(self, "_picks", ())

    @classmethod
    def _of(cls, tree: _Tree, picks: tuple[Any, ...]) -> LazyRemoteTensor:
        proxy = object.__new__(cls)
        object.__setattr__(proxy, "_tree", tree)
        object.__setattr__(proxy, "_picks", picks)
        return proxy

    def _child(self, step: Any) -> LazyRemoteTensor:
        return LazyRemoteTensor._of(self._tree, (*self._picks, step))

    def _replaced(self, function: Callable[..., Any], *args: Any) -> LazyRemoteTensor:
        """Return a proxy of this value as it is now, with ``function`` applied when forced."""
        tree = self._tree.frozen()
        if tree.value is not None:
            tree.value = function(tree.value, *args)
        else:
            tree.edits.append((None, function, args, {}))
        return LazyRemoteTensor._of(tree, self._picks)

    def _force(self, in_torch: bool = False) -> Any:
        return self._tree.part(self._picks, in_torch=in_torch)

    def _real_value(self) -> Any:
        """Return the value itself; edits of it reach this proxy."""
        self._tree.whole(in_torch=False)
        return self._force()

    # -- what moves nothing ----------------------------------------------------------------------

    def save(self) -> LazyRemoteTensor:
        """Mark this value to be returned from the trace; its owner ships it."""
        return save(self)

    def __getitem__(self, index: Any) -> Any:
        if _is_plain(index):
            return self._child(index)
        return _call(operator.getitem, (self, index), {}, in_torch=False)

    def __setitem__(self, index: Any, value: Any) -> None:
        if _is_lazy(value) and value._tree is self._tree:
            if repr(value._picks) == repr((*self._picks, index)):
                return  # `x[i] += v` writes back what was already edited in place
        self._tree.edit(self._picks, operator.setitem, (index, value), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _FORCED_DUNDERS:
            raise AttributeError(name)
        if name == "clone":
            return lambda **_: LazyRemoteTensor._of(self._tree.frozen(), self._picks)
        if name.endswith("_") and not name.endswith("__"):
            return _Edited(self, name)
        value = _call(getattr, (self, name), {}, in_torch=False)
        if callable(value) and not isinstance(value, torch.Tensor):
            return _Method(self, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._tree.edit(self._picks, setattr, (name, value), {})

    def __repr__(self) -> str:
        if self._tree.is_here:
            return repr(self._force())
        return f"<LazyRemoteTensor {self._tree.pulled.visit}{''.join(map(_shown, self._picks))}>"

    # -- what needs data -------------------------------------------------------------------------

    @property
    def __class__(self) -> type:  # noqa: PLW3201 - so that isinstance(x, torch.Tensor) is right
        return type(self._force())

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
        if isinstance(value, dict):
            return iter(value)
        return iter([self._child(index) for index in range(len(value))])

    def __len__(self) -> int:
        return len(self._force())

    def __bool__(self) -> bool:
        return bool(self._force())

    def __float__(self) -> float:
        return float(self._force())

    def __int__(self) -> int:
        return int(self._force())

    def __index__(self) -> int:
        return operator.index(self._force())

    def __complex__(self) -> complex:
        return complex(self._force())

    def __contains__(self, item: Any) -> bool:
        return item in self._force()

    def __format__(self, spec: str) -> str:
        return format(self._force(), spec)

    def __str__(self) -> str:
        return str(self._force())

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> LazyRemoteTensor:
        return LazyRemoteTensor._of(self._tree, self._picks)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyRemoteTensor:
        return LazyRemoteTensor._of(self._tree.frozen(), self._picks)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._force(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._force()(*args, **kwargs)


def _itself(value: Any) -> Any:
    return value


_FORCED_DUNDERS = frozenset({"__array__", "__dlpack__", "__dlpack_device__"})


class _Edited:
    """A method that edits in place (`add_`, `zero_`, ...): recorded, and returns its proxy."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: LazyRemoteTensor, name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> LazyRemoteTensor:
        name = self._name
        self._proxy._tree.edit(
            self._proxy._picks, lambda target, *a, **k: getattr(target, name)(*a, **k), args, kwargs
        )
        return self._proxy


class _Method:
    """A method of the value: called on the real one, its lazy arguments forced."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: LazyRemoteTensor, name: str) -> None:
        self._proxy = proxy
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._name
        return _call(
            lambda target, *a, **k: getattr(target, name)(*a, **k),
            (self._proxy, *args),
            kwargs,
            in_torch=False,
        )


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, in_torch: bool
) -> Any:
    """Call ``function`` with every lazy argument forced; see Note [Views of a forced value]."""
    proxies = [leaf for leaf in (*leaves(args), *leaves(kwargs)) if _is_lazy(leaf)]
    name = getattr(function, "__name__", "")
    if "out" in kwargs or name.startswith("__i") or name == "__setitem__" or (
        name.endswith("_") and not name.endswith("__")
    ):
        for proxy in proxies:  # the call may edit its arguments: let it edit the trees' own values
            proxy._tree.whole(in_torch=in_torch)
    result = function(*_real(args, in_torch), **_real(kwargs, in_torch))
    loose = [proxy for proxy in proxies if not proxy._tree.is_here]
    if loose and _shares_memory(result, [proxy._force(in_torch) for proxy in loose]):
        for proxy in loose:
            proxy._tree.whole(in_torch=in_torch)
        result = function(*_real(args, in_torch), **_real(kwargs, in_torch))
    return result


def _shares_memory(result: Any, parts: list[Any]) -> bool:
    held = {
        leaf.untyped_storage().data_ptr()
        for leaf in leaves(parts)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
    }
    return any(
        isinstance(leaf, torch.Tensor)
        and leaf.device.type != "meta"
        and leaf.untyped_storage().data_ptr() in held
        for leaf in leaves(result)
    )


def _is_plain(index: Any) -> bool:
    if isinstance(index, tuple):
        return all(_is_plain(item) for item in index)
    if _is_lazy(index) or isinstance(index, (bool, torch.Tensor)):
        return False
    if isinstance(index, slice):
        return all(
            part is None or (type(part) is int) for part in (index.start, index.stop, index.step)
        )
    return type(index) in _PLAIN_INDEX


def _shown(step: Any) -> str:
    return ".first" if step == FIRST_INPUT else f"[{step!r}]"


def _binary(name: str) -> None:
    """Give the proxy one operator; ``name`` is the operator module's."""
    function = getattr(operator, name)
    stem = name.strip("_")

    def forward(self: LazyRemoteTensor, other: Any) -> Any:
        return _call(function, (self, other), {}, in_torch=False)

    def reflected(self: LazyRemoteTensor, other: Any) -> Any:
        return _call(function, (other, self), {}, in_torch=False)

    setattr(LazyRemoteTensor, f"__{stem}__", forward)
    if stem not in _COMPARISONS:
        setattr(LazyRemoteTensor, f"__r{stem}__", reflected)


def _in_place(stem: str) -> None:
    function = getattr(operator, f"i{stem}")

    def edit(self: LazyRemoteTensor, other: Any) -> LazyRemoteTensor:
        self._tree.edit(self._picks, function, (other,), {})
        return self

    setattr(LazyRemoteTensor, f"__i{stem}__", edit)


def _unary(name: str, function: Callable[..., Any]) -> None:
    def forward(self: LazyRemoteTensor, *args: Any) -> Any:
        return _call(function, (self, *args), {}, in_torch=False)

    setattr(LazyRemoteTensor, name, forward)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
    "lshift", "rshift",
)  # fmt: skip
for _name in (*_ARITHMETIC, *_COMPARISONS):
    _binary(_name)
for _name in _ARITHMETIC:
    _in_place(_name.strip("_"))
for _name, _function in (
    ("__neg__", operator.neg), ("__pos__", operator.pos), ("__abs__", operator.abs),
    ("__invert__", operator.invert), ("__round__", round), ("__reversed__", reversed),
    ("__divmod__", divmod), ("__array__", lambda x, *a: x.__array__(*a)),
):  # fmt: skip
    _unary(_name, _function)
