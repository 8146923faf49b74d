"""Blocks on their way to the ranks.

A block travels as source text with the objects that its names stand for. What exists on both sides
under a name (the model, its modules, the tracer) travels as that name. Functions and classes of
the user's own files travel by value, since the ranks do not run the user's main module and must
not import a script that would start an engine of its own. Tensors that share memory, and arrays
that do, share it there too: an edit of one shows in the other.
"""

from __future__ import annotations

import io
import pickle
import sys
import sysconfig
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.block import Block

_LIBRARY_FOLDERS = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGE = __name__.partition(".")[0]
# What cloudpickle ships by value is noted for the whole process.
_registry = Lock()


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """What one request carries.

    Attributes:
        trace: Names the request at the client.
        block: The block's text.
        names: The objects that its names stand for.
        saved: Names whose objects were saved before the block began.
        seed: Seeds the numbers that the block draws, alike on every rank.
        grad_enabled: Grad mode of the user's thread at the `with`.
        session: The client's name for the session that it is part of, or an empty text.
        frame: Names the frame in which it is written: blocks of one frame share names.
    """

    trace: str
    block: Block
    names: dict[str, Any]
    saved: tuple[str, ...] = ()
    grad_enabled: bool = True
    seed: int = 0
    frame: int = 0
    session: str = ""


class _Writer(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, name_of: Callable[[Any], Any], stack: ExitStack) -> None:
        super().__init__(file)
        self._name_of = name_of
        self._stack = stack
        # By the address of each: torch makes a new object of a storage at every look.
        self._storages: dict[int, Any] = {}
        # The ids of arrays in which several of the names look.
        self.shared: set[int] = set()

    def persistent_id(self, obj: Any) -> Any:
        return self._name_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            module = sys.modules.get(getattr(obj, "__module__", None) or "")
            if module is not None and is_users(module):
                self._by_value(module)
        elif type(obj) is torch.storage.TypedStorage:
            storage = obj._untyped_storage
            return _typed, (self._storages.setdefault(storage._cdata, storage), obj.dtype)
        elif type(obj) is torch.UntypedStorage:
            held = torch.empty(0, dtype=torch.uint8).set_(obj.cpu())
            return _memory, (bytearray(held.numpy().data), str(obj.device))
        elif type(obj) is np.ndarray and obj.base is not None:
            whole = _owner(obj)
            if whole is not obj and id(whole) in self.shared:
                start = obj.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
                return np.ndarray, (obj.shape, obj.dtype, whole, start, obj.strides)
        return super().reducer_override(obj)

    def _by_value(self, module: ModuleType) -> None:
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._stack.callback(cloudpickle.unregister_pickle_by_value, module)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _memory(data: bytearray, device: str) -> torch.UntypedStorage:
    # A copy, which torch may make larger.
    held = torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0)
    return held.to(device).untyped_storage()


def _owner(array: Any) -> Any:
    """Return the array whose memory ``array`` shows."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


def _shared_arrays(names: list[dict[str, Any]]) -> set[int]:
    """Return the ids of arrays in whose memory several of those below ``names`` look."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [*names]
    while waiting:
        one = waiting.pop()
        # CAUTION: a lazy value answers `isinstance` by moving bytes, so its type is asked.
        if id(one) in seen or not issubclass(type(one), (list, tuple, dict, np.ndarray)):
            continue
        seen[id(one)] = one
        if not isinstance(one, np.ndarray):
            waiting.extend(one.values() if isinstance(one, dict) else one)
    owners = Counter(id(_owner(one)) for one in seen.values() if type(one) is np.ndarray)
    return {owner for owner, number in owners.items() if number > 1}


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, object_of: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._object_of = object_of

    def persistent_load(self, pid: Any) -> Any:
        return self._object_of(pid)


def is_users(module: ModuleType) -> bool:
    """Whether ``module`` is the user's own code rather than an installed library."""
    if module.__name__.partition(".")[0] in (_PACKAGE, "__main__", "builtins"):
        return False
    file = getattr(module, "__file__", None)
    return file is not None and not _is_installed(file)


@lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def encode_block(message: BlockMessage, name_of: Callable[[Any], Any]) -> bytes:
    """Return ``message`` as bytes.

    Args:
        message: The block and its names.
        name_of: Returns what stands for an object that exists on both sides, or None.
    """
    return _encoded(message, [message], name_of)


def encode_blocks(messages: list[BlockMessage], name_of: Callable[[Any], Any]) -> bytes:
    """Return ``messages`` as bytes; what is one object in several of them stays one."""
    return _encoded(messages, messages, name_of)


def _encoded(value: Any, messages: list[BlockMessage], name_of: Callable[[Any], Any]) -> bytes:
    file = io.BytesIO()
    with _registry, ExitStack() as stack:
        writer = _Writer(file, name_of, stack)
        writer.shared = _shared_arrays([one.names for one in messages])
        writer.dump(value)
    return file.getvalue()


def decode_block(data: bytes, object_of: Callable[[Any], Any]) -> BlockMessage:
    """Return the message of ``data``; ``object_of`` is the inverse of ``name_of``."""
    message = _Reader(io.BytesIO(data), object_of).load()
    assert isinstance(message, BlockMessage)
    return message


def decode_blocks(data: bytes, object_of: Callable[[Any], Any]) -> list[BlockMessage]:
    """Return the messages of ``data``; ``object_of`` is the inverse of ``name_of``."""
    messages = _Reader(io.BytesIO(data), object_of).load()
    assert isinstance(messages, list)
    return messages
