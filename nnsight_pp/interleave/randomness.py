"""The random numbers that a block draws on an engine: alike on every rank, and nobody else's.

Every rank runs the same block, so from one seed every rank draws the same numbers. While a worker
has the turn, the generators of the process are its own; when it gives the turn back, they are what
they were before. So neither the model's sampling nor another request's block sees a draw. torch's
default dtype, and its other settings where the user's differ, are exchanged with them.

torch's CPU generator is exchanged at every turn, and CUDA's where CUDA is in use. The states of
Python's `random` and of `numpy.random` are costly to read, so they are exchanged only for a block
that may draw from them (`interleave.draws`).

Not covered: numbers that are meant to differ at every run. A generator that the block makes without
a seed (`numpy.random.default_rng()`, `torch.Generator().seed()`, `random.seed()`,
`random.SystemRandom`) differs on every rank. Give it a seed.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Self, final

import torch

from nnsight_pp.core.surroundings import Exchanged, OfProcess
from nnsight_pp.errors import NotSupportedError, explain

_SEED_BITS = 64
_CPU = torch.default_generator


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
        settings: What it sees of torch's other settings, where that differs from the process's.

    Cost: 4 microseconds a turn; 43 more with ``python``, 340 more with ``numpy``.
    """

    __slots__ = (
        "_begun_with", "_driver", "_drivers_dtype", "_drivers_modules", "_dtype", "_is_torch_alone",
        "_modules", "_numpy", "_own", "_python", "_seed", "_settings",
    )  # fmt: skip

    def __init__(
        self,
        seed: int,
        *,
        python: bool,
        numpy: bool,
        dtype: torch.dtype = torch.float32,
        modules: Mapping[str, ModuleType] = MappingProxyType({}),
        settings: OfProcess | None = None,
    ) -> None:
        self._settings = None if settings is None else Exchanged(settings)
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
        if self._settings is not None:
            self._settings.__enter__()
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
        if self._settings is not None:
            self._settings.__exit__()
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
