"""What stands in a report for values that do not travel: a session's traces share them.

Inside `model.session()` a trace on an engine binds all its names, not only what it saved. Tensors
stay on the stages that have them, under a key; the model, its modules and objects of the user's own
are at home already. Anything else that is more than plain data is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import children, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Split:
    """A saved value of which each stage holds a part."""

    __slots__ = ()

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the whole of ``parts``, what the stages hold of it, in their order."""
        raise NotImplementedError


_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice,
    range, Split,
)  # fmt: skip


@final
class Kept(Split):
    """A tensor that stays where it was computed.

    Attributes:
        key: Its name, alike on every stage that has it.
        stages: Those stages.
    """

    __slots__ = ("key", "stages")

    def __init__(self, key: str, stages: tuple[int, ...]) -> None:
        self.key = key
        self.stages = stages

    def joined(self, parts: Sequence[Kept]) -> Kept:
        """Return the same for all stages that have it."""
        assert {part.key for part in parts} == {self.key}
        return Kept(self.key, tuple(stage for part in parts for stage in part.stages))


@final
class AtHome:
    """An object that the client has.

    Attributes:
        kind: "name": what one of the block's names stood for; "lost": nothing, as the value cannot
            leave the ranks; else what travels in its place.
        name: That name, or path; for what is lost, what it is.
    """

    __slots__ = ("kind", "name")

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name


class NotKeptError(Exception):
    """A value is more than tensors and plain data."""


def with_kept(value: Any, key: str, keep: Callable[[str, Any], Any]) -> Any:
    """Return ``value`` as it goes into a report.

    Args:
        value: What a block has bound to a name.
        key: Names it; each part of it gets a longer one.
        keep: Returns what stands for a part that is no plain data, or raises `NotKeptError`.
    """
    parts = None if is_plain_data(value) else children(value)
    if parts is None:
        return value if is_plain_data(value) else keep(key, value)
    return rebuild(
        value, [with_kept(part, f"{key}/{index}", keep) for index, part in enumerate(parts)]
    )


def is_plain_data(value: Any) -> bool:
    """Whether ``value`` may travel as it is. Does not look into remote values."""
    return not issubclass(type(value), RemoteValue) and isinstance(value, _PLAIN)


class Look(NamedTuple):
    """How a tensor or an array shows the memory of another one.

    Attributes:
        dtype: torch's; or numpy's, as its array interface spells it.
        shape: Its shape.
        strides: A tensor's in elements, an array's in bytes.
        offset: Where it begins, in bytes from the first one of the other.
        is_writeable: Whether it may be written to.
    """

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_writeable: bool


@final
class FromHome:
    """Stands for an object that came with a block: the client has it, and gives it back itself.

    Attributes:
        trace: The client's name for the request that brought it.
        name: What the block's text calls it, or what leads to it.
        path: What leads to it from there, as `engines.vllm.outer.Before` has it.
        look: How what is meant shows that object's memory; None where it is the object itself.
    """

    __slots__ = ("look", "name", "path", "trace")

    def __init__(
        self, trace: str, name: str, path: tuple[Any, ...], look: Look | None = None
    ) -> None:
        self.trace = trace
        self.name = name
        self.path = path
        self.look = look
