"""Who asks for the class of an object: Python code, or torch's C++ code.

`isinstance(lazy, torch.Tensor)` must be true where the owner's is, or ranks take other branches.
But torch's C++ asks the same question in the same way, and takes what says yes for a tensor: it
then reads memory that is none, and crashes. The instruction that runs in the calling frame tells
the two apart.

`type(lazy)` asks nobody, so blocks and what they bring along get a `type` of ours.

``match`` looks for a sequence at a flag of the class alone. A lazy value's class has it, and the
length that a pattern asks for next is one that it does not take where the value is no sequence.
"""

from __future__ import annotations

import builtins
import dis
from abc import ABC
from functools import lru_cache
from types import GenericAlias
from typing import TYPE_CHECKING, Any

import cloudpickle.cloudpickle

from nnsight_pp.core.meaning import IS
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.errors import NotSupportedError, explain

if TYPE_CHECKING:
    from types import CodeType, FrameType

# What Python code calls to ask: the builtin, and what the metaclass of `abc` does for it.
_NAMES = frozenset({"isinstance", "_abc_instancecheck"})
_ATTRIBUTES = frozenset({"__instancecheck__"})
# What ``match`` looks at: Py_TPFLAGS_SEQUENCE.
_SEQUENCE = 1 << 5
_GET_LEN = dis.opmap["GET_LEN"]


def is_asked_by_python(frame: FrameType) -> bool:
    """Tell whether ``frame`` asks for a class by `isinstance`, ``match`` or ``.__class__``."""
    return _is_asked_at(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _is_asked_at(code: CodeType, offset: int) -> bool:
    instructions = list(dis.get_instructions(code))
    current = next((one for one in instructions if one.offset == offset), None)
    if current is None:
        return False
    if current.opname == "MATCH_CLASS":
        return True
    if current.opname.startswith("LOAD_ATTR"):
        return current.argval == "__class__"
    # Python 3.11 makes a call that it has made often in the instruction before CALL.
    is_call = current.opname.startswith(("CALL", "PRECALL"))
    if not is_call:
        return False
    where = current.positions
    if where is None or where.col_offset is None:
        raise NotSupportedError(
            explain(
                "The class of another stage's value was asked for by code without columns.",
                why="They tell a question of Python from one of torch's C++.",
                todo="Unset PYTHONNODEBUGRANGES, and start Python without `-X no_debug_ranges`.",
            )
        )
    # The callee is the first thing that the call's own text loads.
    start = (where.lineno, where.col_offset)
    for one in instructions:
        if one.offset >= offset:
            return False
        place = one.positions
        if place is None or (place.lineno, place.col_offset) != start:
            continue
        if one.opname.startswith(("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF")):
            if one.argval in _NAMES:
                return True
        elif one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")) and (
            one.argval in _ATTRIBUTES
        ):
            return True
    return False


class MatchedAsSequence(ABC):  # noqa: B024  a flag has no method
    """What is registered here is a sequence for ``match``, and for nobody else.

    Source: CPython 3.11 Modules/_abc.c:_abc__abc_register_impl hands the flag on.
    """

    __abc_tpflags__ = _SEQUENCE


def is_sequence(value: Any) -> bool:
    """Whether ``case [...]`` takes ``value``, whatever its length."""
    return bool(type(value).__flags__ & _SEQUENCE)


def length_that_does_not_match(frame: FrameType) -> int | None:
    """Return a length for which the pattern at which ``frame`` stands fails; None at no pattern."""
    code, offset = frame.f_code, frame.f_lasti
    return _unmatched_at(code, offset) if code.co_code[offset] == _GET_LEN else None


@lru_cache(maxsize=4096)
def _unmatched_at(code: CodeType, offset: int) -> int:
    # It compares with how many there must be at least, or exactly.
    wanted = next(one.argval for one in dis.get_instructions(code) if one.offset > offset)
    return wanted - 1 if wanted else 1


class _KindOfType(type):
    """The class of `Type`: what is asked of it is asked of Python's own `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Type:  # a metaclass of the user's
            return super().__call__(*args, **kwargs)
        kind = type(*args, **kwargs)
        is_stand_in = len(args) == 1 and issubclass(kind, RemoteValue)
        return type(args[0]._force()) if is_stand_in else kind

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type) if cls is Type else super().__instancecheck__(instance)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is Type else super().__subclasscheck__(kind)


class Type(type, metaclass=_KindOfType):
    """`type`, as the code of a block sees it: `type(lazy)` is the class of the value itself."""

    def __class_getitem__(cls, item: Any) -> Any:
        return GenericAlias(type, item)


def is_same(one: Any, other: Any) -> bool:
    """Answer `one is other` as the owner of a value that one of them stands for would."""
    if one is other:
        return True
    if issubclass(type(one), RemoteValue):
        return one._is(other)
    return issubclass(type(other), RemoteValue) and other._is(one)


# What a block's names are looked up in at last.
BUILTINS = {**vars(builtins), "type": Type}
setattr(Type, IS, staticmethod(is_same))


def give_type_to_functions() -> None:
    """Let the functions that come to this process with blocks see `Type` too.

    Source: cloudpickle 3.1 cloudpickle.py:_make_function gives them its own module's builtins.
    """
    cloudpickle.cloudpickle.__dict__["__builtins__"] = BUILTINS
