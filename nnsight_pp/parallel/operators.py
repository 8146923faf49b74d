"""Python's operators on a lazy value: each calls the real one, or records an edit in place.

And what can be told of a call without the value: whether an index is plain, and what is edited.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
    "lshift", "rshift",
)  # fmt: skip
_PLAIN_INDEX = (int, slice, str, type(None), type(Ellipsis))
_UNARY = {
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": operator.abs,
    "__invert__": operator.invert,
    "__round__": round,
    "__reversed__": reversed,
    "__divmod__": divmod,
}


def give_operators(kind: Any, call: Callable[..., Any]) -> None:
    """Give ``kind`` every operator.

    Args:
        kind: The class. Its ``_edit(function, args, kwargs)`` makes or records an edit in place.
        call: ``call(function, args, kwargs, in_torch=...)`` calls with real values.
    """
    for name in (*_ARITHMETIC, *_COMPARISONS):
        _binary(kind, call, name)
    for name in _ARITHMETIC:
        _in_place(kind, name.strip("_"))
    for name, function in _UNARY.items():
        _unary(kind, call, name, function)


def _binary(kind: Any, call: Callable[..., Any], name: str) -> None:
    """Give ``kind`` one operator; ``name`` is the operator module's."""
    function = getattr(operator, name)
    stem = name.strip("_")

    def forward(self: Any, other: Any) -> Any:
        return call(function, (self, other), {}, in_torch=False)

    def reflected(self: Any, other: Any) -> Any:
        return call(function, (other, self), {}, in_torch=False)

    setattr(kind, f"__{stem}__", forward)
    if stem not in _COMPARISONS:
        setattr(kind, f"__r{stem}__", reflected)


def _in_place(kind: Any, stem: str) -> None:
    function = getattr(operator, f"i{stem}")

    def edit(self: Any, other: Any) -> Any:
        changed = self._edit(function, (other,), {})
        return self if changed is NotImplemented else changed

    setattr(kind, f"__i{stem}__", edit)


def _unary(kind: Any, call: Callable[..., Any], name: str, function: Callable[..., Any]) -> None:
    def forward(self: Any, *args: Any) -> Any:
        return call(function, (self, *args), {}, in_torch=False)

    setattr(kind, name, forward)


def is_plain(index: Any) -> bool:
    """Whether ``index`` gives a view, and can be sent as it is."""
    if type(index) is tuple:
        return all(is_plain(item) for item in index)
    if type(index) is slice:
        return all(
            part is None or type(part) is int for part in (index.start, index.stop, index.step)
        )
    return type(index) in _PLAIN_INDEX


def edited_by(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments that a call of ``function`` may edit in place."""
    name = getattr(function, "__name__", "")
    is_in_place = (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        or bool(kwargs.get("inplace"))
    )
    return (args[:1] if is_in_place else (), kwargs.get("out"))
