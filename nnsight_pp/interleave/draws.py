"""Which generators a block may draw from: those of Python's `random`, and of `numpy.random`.

That is decided from the names which can be reached from the block's code: the code of the block, of
what it defines, and of the functions, methods and modules that it refers to, the installed ones
included, torch and the standard library excepted.

* A name, an attribute, an import or a text ``random``, or a function of either module, counts as a
  draw; it may be one from `numpy.random` where numpy is in reach too.
* Code that can reach any name (`eval`, `exec`, `__import__`, `import_module`), and code that is too
  large to be looked through, counts as a draw from both.

Not covered: code that is found only when it runs (`getattr` with a text that was put together, a
compiled extension that draws by itself).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.meaning import all_codes

if TYPE_CHECKING:
    from collections.abc import Iterable

# How many pieces of code and how many values are looked at before a block counts as drawing.
_MOST_CODES = 2000
_MOST_VALUES = 20_000
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Tensor})
_ANY_NAME = frozenset({"eval", "exec", "__import__", "import_module"})
# What draws from neither, or only by functions that are found by their class.
_QUIET = frozenset(
    {"torch", "nnsight_pp", "numpy", *sys.stdlib_module_names} - {"test", "__main__"}
)
# Quiet themselves; what they hold may not be.
_HOLDERS = (torch.nn.Module, type(lru_cache(int)))


class Draws(NamedTuple):
    """Whether a block may draw from the generators that are costly to exchange."""

    python: bool
    numpy: bool


# Said of code that is not looked through: that, and that it mentions every word.
ANYTHING = (Draws(python=True, numpy=True), True)


def draws_of(code: CodeType, names: Mapping[str, Any]) -> Draws:
    """Return from which generators ``code`` may draw, which looks ``names`` up around itself.

    Cost: some 20 microseconds for a block without helpers; below 10 milliseconds for any.
    """
    return draws_and_mentions(code, names, frozenset())[0]


def mentions(code: CodeType, names: Mapping[str, Any], words: frozenset[str]) -> bool:
    """Whether ``code``, or what it can reach, may look up one of ``words`` as a name or attribute.

    Cost: as `draws_of`.
    """
    return draws_and_mentions(code, names, words)[1]


def draws_and_mentions(
    code: CodeType, names: Mapping[str, Any], words: frozenset[str]
) -> tuple[Draws, bool]:
    """Return what `draws_of` and `mentions` do, in one walk."""
    scan = _Scan(words)
    scan.add_code(code, names)
    try:
        draws = scan.run()
    except RecursionError:  # objects in objects, too deep to be looked through
        return Draws(python=True, numpy="numpy" in sys.modules), True
    return draws, scan.has_found


@final
class _Scan:
    """A walk over the code that a block can reach.

    Args:
        words: Names and attributes to be looked for as well.

    Attributes:
        has_found: Whether one of them is mentioned, or may be.
    """

    def __init__(self, words: frozenset[str]) -> None:
        self._words = words
        self.has_found = False
        self._has_numpy = False
        self._is_drawing = False
        self._is_open = False
        self._seen: set[int] = set()
        self._codes: list[tuple[CodeType, Mapping[str, Any]]] = []
        # Keeps alive what `_seen` names by id.
        self._alive: list[Any] = []

    def add_code(self, code: CodeType, names: Mapping[str, Any]) -> None:
        """Look through ``code``, whose names mean what ``names`` says."""
        self._codes.append((code, names))

    def run(self) -> Draws:
        """Return what anything in reach may draw from."""
        num_codes = 0
        while self._codes and not self._is_open:
            code, names = self._codes.pop()
            for one in all_codes(code):
                num_codes += 1
                self._visit_code(one, names)
            if num_codes > _MOST_CODES:
                self._is_open = True
        if self._is_open:
            self.has_found = True
            return Draws(python=True, numpy="numpy" in sys.modules or self._has_numpy)
        return Draws(self._is_drawing, self._is_drawing and self._has_numpy)

    def _visit_code(self, code: CodeType, names: Mapping[str, Any]) -> None:
        mentioned = [*code.co_names, *(one for one in code.co_consts if isinstance(one, str))]
        for name in mentioned:
            parts = name.split(".") if len(name) < 100 else ()
            self._has_numpy = self._has_numpy or "numpy" in parts
            self._is_drawing = self._is_drawing or "random" in parts
            self._is_open = self._is_open or not _ANY_NAME.isdisjoint(parts)
            self.has_found = self.has_found or not self._words.isdisjoint(parts)
        for name in code.co_names:
            try:
                value = names[name]
            except (KeyError, NameError):  # what another invoke has not bound yet
                continue
            self._visit(value, code.co_names)

    def _visit(self, value: Any, mentioned: Iterable[str]) -> None:
        """Look at a value that is in reach; ``mentioned`` may be attributes of it."""
        # CAUTION: a value of the model is read when it is asked for an attribute, even its class.
        kind = type(value)
        is_known = id(value) in self._seen and not issubclass(kind, ModuleType)
        if is_known or kind in _PLAIN or self._is_open:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        self._is_open = len(self._alive) > _MOST_VALUES
        if issubclass(kind, ModuleType):
            self._visit_module(value, mentioned)
        elif issubclass(kind, partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part, mentioned)
        elif kind is MethodType:
            self._visit(value.__func__, mentioned)
            self._visit(value.__self__, mentioned)
        elif kind is FunctionType:
            self._visit_function(value)
        elif kind in (list, tuple, set, frozenset):
            for part in value:
                self._visit(part, mentioned)
        elif kind is dict:
            for part in value.values():
                self._visit(part, mentioned)
        elif issubclass(kind, type):
            self._visit_class(value)
        else:
            self._visit_object(value)

    def _is_settled(self, module: str) -> bool:
        """Note what a thing of ``module`` may draw from; return whether that is all there is."""
        root = _root(module)
        self._has_numpy = self._has_numpy or root == "numpy"
        if module == "random" or module.startswith("numpy.random"):
            self._is_drawing = True
        return root in _QUIET

    def _visit_module(self, module: ModuleType, mentioned: Iterable[str]) -> None:
        if not self._is_settled(module.__name__):
            held = vars(module)
            for name in mentioned:
                part = held.get(name)
                if part is not None and id(part) not in self._seen:
                    self._visit(part, mentioned)

    def _visit_function(self, function: FunctionType) -> None:
        if not self._is_settled(function.__module__ or ""):
            self.add_code(function.__code__, function.__globals__)
            names = function.__code__.co_names
            for cell in function.__closure__ or ():
                try:
                    self._visit(cell.cell_contents, names)
                except ValueError:
                    continue  # not bound yet
            named = (function.__kwdefaults__ or {}).values()
            for default in (*(function.__defaults__ or ()), *named):
                self._visit(default, names)

    def _visit_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if not self._is_settled(one.__module__):
                for part in list(vars(one).values()):
                    if isinstance(part, staticmethod | classmethod):
                        part = part.__func__
                    elif isinstance(part, property):
                        part = part.fget
                    if type(part) is FunctionType:
                        self._visit(part, ())

    def _visit_object(self, value: Any) -> None:
        kind = type(value)
        self._visit(kind, ())
        if kind is BuiltinMethodType:  # `random.random` is a method of an object
            self._visit(type(value.__self__), ())
        elif _root(kind.__module__) not in _QUIET or issubclass(kind, _HOLDERS):
            try:
                held = object.__getattribute__(value, "__dict__")
            except AttributeError:
                return
            for part in list(held.values()):
                self._visit(part, ())


def _root(module: str) -> str:
    return module.partition(".")[0]
