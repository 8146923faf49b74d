"""What a block reaches of the user's own code, beyond its own text, and refuses of it.

That is what travels with the block: the functions that its names lead to. A method counts where its
name is mentioned by what counts already, or is one that Python or torch calls by itself. Code of
libraries is not looked at: it runs on the ranks as it does anywhere.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.engines.vllm.imports import missing_of, modules_of
from nnsight_pp.engines.vllm.members import around_of
from nnsight_pp.engines.vllm.outer import is_of_the_user
from nnsight_pp.engines.vllm.told import Told, told_by
from nnsight_pp.wire.block_codec import is_installed, is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nnsight_pp.wire.block_codec import BlockMessage

_CONTAINERS = (list, dict, set, deque, OrderedDict)
# Methods that torch calls by itself.
_BY_TORCH = frozenset({"backward", "forward", "jvp", "setup_context", "step", "vjp"})
# Its methods are found by their names alone.
_PATCHED = (torch.Tensor, torch.nn.Module)
_MOCKS = frozenset(("unittest.mock", name) for name in ("patch", "_patch_object"))
_NOT_THERE = object()


@dataclass(frozen=True)
class Code:
    """Code that a block reaches.

    Attributes:
        told: What it says.
        names: What its names mean.
        package: What it imports relatively to.
        function: The function that it is the code of; None for a block's own.
    """

    told: Told
    names: Mapping[str, Any]
    package: str
    function: FunctionType | None = None

    def modules(self) -> dict[str, ModuleType]:
        """Return the user's modules that it imports."""
        return modules_of(self.told, self.package)

    def missing(self) -> str | None:
        """Return a user's module that it imports and that cannot travel, or None."""
        return missing_of(self.told, self.package)

    def sets(self) -> tuple[str, int | None] | None:
        """Return what it sets on a library or in its process, and the line if known; or None."""
        for word in self.told.setters:
            uses = [path for path in self.told.uses if path[-1] == word]
            if not uses or not all(map(self._is_method_of_an_own_object, uses)):
                return word, None
        for change in self.told.changes:
            owner, is_librarys = self._owner(change.path[:-1])
            if change.is_call and not isinstance(owner, _CONTAINERS):
                continue
            if is_librarys:
                return ".".join(change.path).removesuffix("...").rstrip("."), change.line
        for path, (found, _) in self._used.items():
            if type(found) is FunctionType and (found.__module__, found.__name__) in _MOCKS:
                return ".".join(path), None
        return None

    def replaced(self) -> tuple[str, FunctionType] | None:
        """Return a function of a library that it uses and the user has replaced, or None.

        That is the name and the user's own function. What only a library's code uses is not seen.
        """
        for path, (found, is_librarys) in self._used.items():
            if is_librarys and type(found) is FunctionType and _is_users_function(found):
                return ".".join(path), found
        for kind in _PATCHED:
            held = vars(kind)
            for name in held.keys() & self.told.mentions:
                if type(held[name]) is FunctionType and _is_users_function(held[name]):
                    return f"{kind.__name__}.{name}", held[name]
        return None

    @cached_property
    def _used(self) -> dict[tuple[str, ...], tuple[Any, bool]]:
        """What is found by each path that it uses, as `_owner` tells."""
        return {path: self._owner(path) for path in self.told.uses}

    def _is_method_of_an_own_object(self, path: tuple[str, ...]) -> bool:
        """Whether ``path`` calls a method that the user has written, of an object around it."""
        kind = type(self._owner(path[:-1])[0]) if path[:-1] else None
        method = inspect.getattr_static(kind, path[-1], None)
        return type(method) is FunctionType and _is_users_function(method)

    def _owner(self, path: tuple[str, ...]) -> tuple[Any, bool]:
        """Return what is found by ``path``, and whether a library holds it, or it is one itself."""
        module, part = self.told.known_as.get(path[0], ("", ""))
        found = sys.modules.get(module) if module else self.names.get(path[0], _NOT_THERE)
        if part:
            found = getattr(found, part, _NOT_THERE)
        is_librarys = _is_of_a_library(found)
        for name in path[1:]:
            # CAUTION: a value of the model is read when it is asked for an attribute.
            if not issubclass(type(found), (ModuleType, type)):
                return _NOT_THERE, is_librarys
            found = inspect.getattr_static(found, name, _NOT_THERE)
            is_librarys = is_librarys or _is_of_a_library(found)
        return found, is_librarys


def code_of(message: BlockMessage) -> Code:
    """Return the code of the block itself."""
    module = message.names.get("__name__", "")
    return Code(told_by(message.block.code()), message.names, module.rpartition(".")[0])


def reached_by(messages: Iterable[BlockMessage], functions: Iterable[FunctionType]) -> list[Code]:
    """Return what the blocks of ``messages`` reach that says anything of its process.

    Args:
        messages: Blocks that travel together.
        functions: Those that travel with them.

    Cost: 2 microseconds a function, where none says anything.
    """
    own = [(one, told_by(one.__code__)) for one in functions if _is_users_function(one)]
    if all(_is_silent(told) for _, told in own):
        return []
    mentions = {name for one in messages for name in told_by(one.block.code()).mentions}
    reached: list[Code] = []
    is_growing = True
    while is_growing:
        waiting, is_growing = own, False
        own = []
        for function, told in waiting:
            if not _counts(function, mentions):
                own.append((function, told))
                continue
            is_growing = True
            mentions |= told.mentions
            if not _is_silent(told):
                names = function.__globals__
                package = names.get("__package__") or str(names.get("__name__")).rpartition(".")[0]
                reached.append(Code(told, around_of(function), package, function))
    return reached


def _is_silent(told: Told) -> bool:
    return not any(
        (told.imports, told.texts, told.environment, told.setters, told.changes, told.uses)
    )


def _counts(function: FunctionType, mentions: set[str]) -> bool:
    """Whether ``function`` may be called, where ``mentions`` are mentioned."""
    holder = function.__qualname__.rpartition(".")[0]
    is_method = holder and not holder.endswith("<locals>")
    name = function.__name__
    is_called = name in _BY_TORCH or (name[:2] == "__" and name[-2:] == "__")
    return not is_method or is_called or name in mentions


def _is_users_function(function: FunctionType) -> bool:
    return is_of_the_user(function) and not is_installed(function.__code__.co_filename)


def _is_of_a_library(found: Any) -> bool:
    kind = type(found)
    if issubclass(kind, type):
        found = sys.modules.get(found.__module__)
        return found is not None and _is_of_a_library(found)
    return issubclass(kind, ModuleType) and found.__name__ != "__main__" and not is_users(found)
