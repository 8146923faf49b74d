"""The random numbers that a block draws on an engine: alike on every rank, and nobody else's.

Every rank runs the same block, so from one seed every rank draws the same numbers. While a worker
has the turn, the generators of the process are its own; when it gives the turn back, they are what
they were before. So neither the model's sampling nor another request's block sees a draw. torch's
default dtype is exchanged with them.

torch's CPU generator is exchanged at every turn, and CUDA's where CUDA is in use. The states of
Python's `random` and of `numpy.random` are costly to read, so they are exchanged only for a block
that may draw from them. `draws_of` decides that from the names which can be reached from the
block's code: the code of the block, of what it defines, and of the functions, methods and modules
that it refers to, the installed ones included, torch and the standard library excepted.

* A name, an attribute, an import or a text ``random``, or a function of either module, counts as a
  draw; it may be one from `numpy.random` where numpy is in reach too.
* Code that can reach any name (`eval`, `exec`, `__import__`, `import_module`), and code that is too
  large to be looked through, counts as a draw from both.

Not covered: numbers that are meant to differ at every run. A generator that the block makes without
a seed (`numpy.random.default_rng()`, `torch.Generator().seed()`, `random.seed()`,
`random.SystemRandom`) differs on every rank. Give it a seed. Nor is code that is found only when
it runs (`getattr` with a text that was put together, a compiled extension that draws by itself).
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch

from nnsight_pp.core.meaning import all_codes
from nnsight_pp.errors import NotSupportedError, explain

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
_SEED_BITS = 64
_CPU = torch.default_generator


class Draws(NamedTuple):
    """Whether a block may draw from the generators that are costly to exchange."""

    python: bool
    numpy: bool


# Said of code that is not looked through: that, and that it mentions every word.
ANYTHING = (Draws(python=True, numpy=True), True)


class Kept(NamedTuple):
    """States of all generators of the process that are exchanged."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None = None
    python: Any = None
    numpy: Any = None


@final
class Randomness:
    """One worker's generators. Enter it for each turn of the worker.

    Args:
        seed: Alike on every rank, different for every request.
        python: Whether the block may draw from Python's `random`.
        numpy: Whether it may draw from `numpy.random`.
        dtype: What torch makes floating-point tensors of, where nothing is said. It is exchanged
            with the generators: the model must not see what a block sets.
        modules: What its imports find under these names, likewise.

    Cost: 4 microseconds a turn; 43 more with ``python``, 340 more with ``numpy``.
    """

    __slots__ = (
        "_begun_with", "_driver", "_drivers_dtype", "_drivers_modules", "_dtype", "_is_torch_alone",
        "_modules", "_numpy", "_own", "_python", "_seed",
    )  # fmt: skip

    def __init__(
        self,
        seed: int,
        *,
        python: bool,
        numpy: bool,
        dtype: torch.dtype = torch.float32,
        modules: Mapping[str, ModuleType] = MappingProxyType({}),
    ) -> None:
        self._modules = modules
        self._drivers_modules: dict[str, ModuleType] = {}
        self._begun_with = self._dtype = self._drivers_dtype = dtype
        self._seed = seed % (1 << _SEED_BITS)
        self._python = python
        self._is_torch_alone = not (python or numpy)
        # Imported only here: a process that never draws from it need not have it.
        self._numpy: Any = importlib.import_module("numpy.random") if numpy else None
        # Invariant: the driver's states are held exactly while the worker has the turn.
        self._driver: Kept | None = None
        self._own: Kept | None = None

    def __enter__(self) -> Self:
        """Keep the driver's states, and put the worker's in force."""
        assert self._driver is None, "a worker got a second turn inside its own"
        own = self._own
        if self._modules:
            self._drivers_modules = {
                name: sys.modules[name] for name in self._modules if name in sys.modules
            }
            sys.modules.update(self._modules)
        self._drivers_dtype = torch.get_default_dtype()
        if self._drivers_dtype is not self._dtype:
            torch.set_default_dtype(self._dtype)
        if own is not None and self._is_torch_alone and not torch.cuda.is_initialized():
            self._driver = Kept(_CPU.get_state())
            _CPU.set_state(own.cpu)
            return self
        self._driver = self.kept()
        try:
            if self._own is None:
                self._start()
            else:
                self.restore(self._own)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the worker's states, and put the driver's in force, however the turn ended."""
        driver, self._driver = self._driver, None
        assert driver is not None
        for name in self._modules:
            if name in self._drivers_modules:
                sys.modules[name] = self._drivers_modules[name]
            else:
                sys.modules.pop(name, None)
        self._dtype = torch.get_default_dtype()
        if self._drivers_dtype is not self._dtype:
            torch.set_default_dtype(self._drivers_dtype)
        if self._is_torch_alone and not torch.cuda.is_initialized():
            self._own = Kept(_CPU.get_state())
            _CPU.set_state(driver.cpu)
            return
        try:
            self._own = self.kept()
        finally:
            self.restore(driver)

    def left_dtype(self) -> NotSupportedError | None:
        """Return the error for a block that has set torch's default dtype and left it so."""
        if self._dtype is self._begun_with:
            return None
        return NotSupportedError(
            explain(
                f"The block has set torch's default dtype to {self._dtype} and left it so.",
                why="It ran in the engine's processes, and your own would not see it.",
                todo="Set it before the `with`, or set it back inside.",
            )
        )

    def kept(self) -> Kept:
        """Return the states as they are now."""
        cpu = _CPU.get_state()
        cuda = _cuda_generator().get_state() if torch.cuda.is_initialized() else None
        if cuda is None and not self._python and self._numpy is None:  # the usual case
            return Kept(cpu)
        return Kept(
            cpu,
            cuda,
            random.getstate() if self._python else None,
            self._numpy.get_state(legacy=False) if self._numpy is not None else None,
        )

    def restore(self, kept: Kept) -> None:
        """Put ``kept`` in force."""
        _CPU.set_state(kept.cpu)
        if torch.cuda.is_initialized():
            if kept.cuda is None:  # CUDA was started during the last turn
                _cuda_generator().manual_seed(self._seed)
            else:
                _cuda_generator().set_state(kept.cuda)
        if self._python:
            random.setstate(kept.python)
        if self._numpy is not None:
            self._numpy.set_state(kept.numpy)

    def _start(self) -> None:
        torch.default_generator.manual_seed(self._seed)
        if torch.cuda.is_initialized():
            _cuda_generator().manual_seed(self._seed)
        if self._python:
            random.seed(self._seed)
        if self._numpy is not None:
            self._numpy.seed([self._seed & 0xFFFFFFFF, self._seed >> 32])


def _cuda_generator() -> Any:
    return torch.cuda.default_generators[torch.cuda.current_device()]


# ---- which generators a block may draw from ----------------------------------------------------


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
