"""What Python asks of a value itself, where an object stands for it: numbers, texts, members."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.parallel.pulled import real

if TYPE_CHECKING:
    from collections.abc import Callable


class StandIn(RemoteValue):
    """Base of what is used like the value that it stands for. Each of these needs the value."""

    __slots__ = ()

    def _force(self) -> Any:
        """Return the value."""
        raise NotImplementedError

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
        return real(item, False) in self._force()

    def __format__(self, spec: str) -> str:
        return format(self._force(), spec)

    def __str__(self) -> str:
        return str(self._force())

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self._force()
        # A file that a block writes with `torch.save` holds a tensor and nothing of this package.
        return value.__reduce_ex__(protocol) if type(value) is torch.Tensor else (_itself, (value,))


def _itself(value: Any) -> Any:
    return value


def method_of(name: str) -> Callable[..., Any]:
    """Return a function that calls the method ``name`` of its first argument."""

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(target, name)(*args, **kwargs)

    call.__name__ = call.method = name  # pyright: ignore[reportFunctionMemberAccess]
    return call
