"""Blocks on their way to the ranks.

A block travels as source text with the objects that its names stand for. What exists on both sides
under a name (the model, its modules, the tracer) travels as that name. Functions and classes of
the user's own files travel by value, since the ranks do not run the user's main module and must
not import a script that would start an engine of its own. Tensors, arrays and buffers that share
memory share it there too: an edit of one shows in the other.
"""

from __future__ import annotations

import io
import pickle
import sys
import sysconfig
from contextlib import ExitStack
from dataclasses import dataclass, field
from dis import get_instructions
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch

from nnsight_pp.core.meaning import all_codes
from nnsight_pp.wire.odd_objects import BUFFERS, GlobalsOf, reduced, shown_module
from nnsight_pp.wire.shared_memory import (
    memory_at,
    overlapping,
    span_of_array,
    span_of_buffer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.block import Block
    from nnsight_pp.core.surroundings import Surroundings

_LIBRARY_FOLDERS = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
# An array that is made anew whenever its owner is pickled is never known.
_MOST_PASSES = 4
_CACHED = type(lru_cache(int))
# Stands for a module that is not there.
_MAIN = ModuleType("__main__")
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PACKAGE = __name__.partition(".")[0]
# What cloudpickle ships by value is noted for the whole process.
_registry = Lock()


@dataclass(slots=True)
class BlockMessage:
    """What one request carries.

    Attributes:
        trace: Names the request at the client.
        block: The block's text.
        names: The objects that its names stand for.
        saved: Names whose objects were saved before the block began.
        seed: Seeds the numbers that the block draws, alike on every rank.
        session: The client's name for the session that it is part of, or an empty text.
        surroundings: What the user's thread has set at the `with`; None: as where it runs.
        frame: Names the frame in which it is written: blocks of one frame share names.
        around: See `trace.names.SiblingNames`.
        seat: Its place among the blocks of its run; None where there is no other.
    """

    trace: str
    block: Block
    names: dict[str, Any]
    saved: tuple[str, ...] = ()
    seed: int = 0
    frame: int = 0
    session: str = ""
    surroundings: Surroundings | None = None
    around: dict[str, int] = field(default_factory=dict)
    seat: int | None = None


class _Writer(cloudpickle.Pickler):
    """Writes what a block sees, and notes whose memory it has met.

    Args:
        file: Gets the bytes.
        name_of: Returns what travels in an object's place, or None.
        stack: Undoes, at its end, what is noted for the whole process.
        pieces: By the key of a memory: the buffer that travels for it, and where it begins there.
        mentioned: What of the user's modules travels.

    Attributes:
        functions: Those that were met, by id; what travels by name is among them.
    """

    def __init__(
        self,
        file: io.BytesIO,
        name_of: Callable[[Any], Any],
        stack: ExitStack,
        pieces: dict[Any, tuple[Any, int]],
        mentioned: frozenset[str],
    ) -> None:
        super().__init__(file)
        self.functions: dict[int, FunctionType] = {}
        self._name_of = name_of
        self._stack = stack
        self._pieces = pieces
        self._mentioned = mentioned
        # The user's modules that were met, and what the code that was met mentions.
        self.modules: dict[int, ModuleType] = {}
        self.mentions = set(mentioned)
        # By the address of each: torch makes a new object of a storage at every look.
        self._storages: dict[int, Any] = {}
        # What was met, by its key: where its memory lies, and what keeps it.
        self.met: dict[Any, tuple[tuple[int, int], Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in BUFFERS:
            self.met[id(obj)] = span_of_buffer(obj), obj
        return self._name_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, (FunctionType, type)):
            self._note_code(obj)
        elif kind is torch.storage.TypedStorage:
            storage = obj._untyped_storage
            return _typed, (self._storages.setdefault(storage._cdata, storage), obj.dtype)
        elif kind is torch.UntypedStorage:
            return self._storage(obj)
        elif kind is np.ndarray and not obj.dtype.hasobject:
            self.met[id(obj)] = span_of_array(obj), obj
            if id(obj) in self._pieces:
                whole, start = self._pieces[id(obj)]
                start += obj.__array_interface__["data"][0] - span_of_array(obj)[0]
                facts = (obj.shape, obj.dtype, whole, start, obj.strides)
                return _array, (facts, bool(obj.flags.writeable))
        elif kind in _TENSORS and obj.is_leaf and obj.grad is not None:
            # torch leaves it at home.
            return (*obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL), obj.grad, None, None, _set_grad)
        elif kind is ModuleType and is_users(obj):
            return self._module(obj)
        elif kind is not _CACHED or is_users(sys.modules.get(obj.__module__, _MAIN)):
            found = reduced(obj)
            if found is not None:
                return found
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        """Give a function's globals what the bodies of its classes read, which cloudpickle omits.

        Source: cloudpickle 3.1 cloudpickle.py:_extract_code_globals looks for LOAD_GLOBAL alone.
        """
        found = super()._dynamic_function_reduce(func)  # pyright: ignore[reportAttributeAccessIssue]
        names = found[2][1]["__globals__"]
        for name in _read_by_classes(func.__code__) - names.keys():
            if name in func.__globals__:
                names[name] = func.__globals__[name]
        return found

    def _note_code(self, obj: Any) -> None:
        """Let a function or a class of the user's own file travel by value."""
        is_function = isinstance(obj, FunctionType)
        if is_function:
            self.functions[id(obj)] = obj
            self.mentions |= mentioned_in(obj.__code__)
        module = sys.modules.get(getattr(obj, "__module__", None) or "")
        if module is not None and is_users(module):
            self._by_value(module)
            if is_function and obj.__globals__ is vars(module):
                self._globals_of(module)

    def _module(self, module: ModuleType) -> Any:
        names = vars(module)
        self.modules[id(module)] = module
        shown = {one: names[one] for one in names if one in self._mentioned and one[:2] != "__"}
        return shown_module(self._globals_of(module).beginning, shown)

    def _globals_of(self, module: ModuleType) -> GlobalsOf:
        """Return what functions of ``module`` have as their globals on the rank."""
        return self.globals_ref.setdefault(id(vars(module)), GlobalsOf(module))

    def _storage(self, obj: torch.UntypedStorage) -> Any:
        key = "storage", obj._cdata
        if obj.device.type == "cpu":
            start = obj.data_ptr()
            self.met[key] = (start, start + obj.nbytes()), obj
        if key in self._pieces:
            return _part, (*self._pieces[key], obj.nbytes())
        held = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj.cpu())
        return _memory, (bytearray(held.numpy().data), str(obj.device))

    def _by_value(self, module: ModuleType) -> None:
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._stack.callback(cloudpickle.unregister_pickle_by_value, module)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _memory(data: bytearray, device: str) -> torch.UntypedStorage:
    # A copy, which torch may make larger.
    if not data:
        return torch.empty(0, device=device).untyped_storage()
    return torch.frombuffer(data, dtype=torch.uint8).clone().to(device).untyped_storage()


def _set_grad(tensor: torch.Tensor, grad: torch.Tensor) -> None:
    tensor.grad = grad


def _part(whole: Any, start: int, length: int) -> torch.UntypedStorage:
    return torch.frombuffer(whole, dtype=torch.uint8, offset=start, count=length).untyped_storage()


def _array(facts: tuple[Any, ...], is_writeable: bool) -> Any:
    array = np.ndarray(*facts)
    array.flags.writeable = is_writeable
    return array


def _pieces_of(met: dict[Any, tuple[tuple[int, int], Any]]) -> dict[Any, tuple[Any, int]]:
    """Return what travels for memory that several objects look at, and where each begins in it."""
    keys = list(met)
    found: dict[Any, tuple[Any, int]] = {}
    for pool in overlapping([met[key][0] for key in keys]):
        spans = [met[keys[number]][0] for number in pool]
        start, stop = min(spans)[0], max(end for _, end in spans)
        owners = [met[keys[number]][1] for number in pool]
        # One that is a buffer itself holds all of it.
        own = [one for one in owners if type(one) in BUFFERS]
        whole = own[0] if own else bytearray(memory_at(start, stop))
        for number in pool:
            found[keys[number]] = whole, met[keys[number]][0][0] - start
    return found


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
    if file is None:  # a folder without an `__init__.py` has none
        file = next(iter(getattr(module, "__path__", ())), None)
    return file is not None and not is_installed(file)


@lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether ``file`` belongs to an installed library or to Python."""
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def encode_block(
    message: BlockMessage,
    name_of: Callable[[Any], Any],
    functions: dict[int, FunctionType] | None = None,
) -> bytes:
    """Return ``message`` as bytes.

    Args:
        message: The block and its names.
        name_of: Returns what stands for an object that exists on both sides, or None.
        functions: Gets the functions that the block's names lead to, by their id.
    """
    return _encoded(message, [message], name_of, functions)


def encode_blocks(
    messages: list[BlockMessage],
    name_of: Callable[[Any], Any],
    functions: dict[int, FunctionType] | None = None,
) -> bytes:
    """Return ``messages`` as bytes; what is one object in several of them stays one."""
    return _encoded(messages, messages, name_of, functions)


def _encoded(
    value: Any,
    messages: Sequence[BlockMessage],
    name_of: Callable[[Any], Any],
    functions: dict[int, FunctionType] | None,
) -> bytes:
    pieces: dict[Any, tuple[Any, int]] = {}
    mentioned = frozenset().union(*(mentioned_in(one.block.code()) for one in messages))
    kept = []  # what is met keeps its id
    with _registry, ExitStack() as stack:
        while True:
            file = io.BytesIO()
            writer = _Writer(file, name_of, stack, pieces, mentioned)
            writer.dump(value)
            kept.append(writer.met)
            found = _pieces_of(writer.met)
            more = {one for module in writer.modules.values() for one in vars(module)}
            more &= writer.mentions - mentioned
            is_known = found.keys() <= pieces.keys() or len(kept) > _MOST_PASSES
            if is_known and not more:
                if functions is not None:
                    functions.update(writer.functions)
                return file.getvalue()
            # Now it is known, so once more.
            pieces, mentioned = found, mentioned | more


@lru_cache(maxsize=1024)
def mentioned_in(code: CodeType) -> frozenset[str]:
    """Return the names and attributes that ``code`` mentions, and texts that may be such."""
    found: set[str] = set()
    for one in all_codes(code):
        found.update(one.co_names)
        found.update(text for text in one.co_consts if type(text) is str and text.isidentifier())
    return frozenset(found)


@lru_cache(maxsize=1024)
def _read_by_classes(code: CodeType) -> frozenset[str]:
    """Return the names that the bodies of classes within ``code`` look up."""
    inner = [one for one in all_codes(code) if one is not code]
    return frozenset(
        step.argval for one in inner for step in get_instructions(one) if step.opname == "LOAD_NAME"
    )


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
