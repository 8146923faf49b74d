"""Whether a block may mention a word in what it calls, told once for the same functions."""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from nnsight_pp.interleave.draws import mentions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Those that a value can reach by what it holds: who knows what that is.
_OPEN = (list, tuple, dict, set, frozenset)
_MOST_KEPT = 256
_MOST_ITEMS = 100

_known: dict[tuple[Any, ...], bool] = {}


def may_mention(
    code: CodeType, names: Mapping[str, Any], reads: Iterable[str], words: frozenset[str]
) -> bool:
    """Whether ``code``, or what it can reach, may look up one of ``words``.

    Args:
        code: A block.
        names: What its names mean.
        reads: Those that it looks up.
        words: Names and attributes.

    Cost: a microsecond, where the same code has been seen with the same functions; else as
        `interleave.draws.mentions`.
    """
    kinds: list[Any] = []
    for name in sorted(reads):
        try:
            kinds.append(_kind_of(names[name], 0))
        except (KeyError, NameError):
            kinds.append(name)
    key = (code, words, *kinds)
    if None in kinds:
        return mentions(code, names, words)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KEPT:
            _known.clear()
        found = _known[key] = mentions(code, names, words)
    return found


def _kind_of(value: Any, depth: int) -> Any:
    """Return what says which code ``value`` can reach, or None where that is not to be said."""
    # CAUTION: a value of the model is read when it is asked for an attribute, even its class.
    kind = type(value)
    if kind is FunctionType:
        # One that sees others in its cells is made anew at each call, with others.
        return None if value.__closure__ else value
    if issubclass(kind, (type, ModuleType)):
        return value
    if kind in _OPEN:
        if depth or len(value) > _MOST_ITEMS:
            return None
        parts = value.values() if isinstance(value, dict) else value
        found = [_kind_of(one, depth + 1) for one in parts]
        return None if None in found else (kind, *found)
    return kind
