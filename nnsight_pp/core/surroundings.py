"""What a block sees of its process beyond its names: settings that torch and numpy keep.

A worker begins with a clean state of torch's, so what the user's thread has in force is put around
its block again. Where that is another process: what numpy keeps for a context is set in the
worker's, and what torch keeps for the whole process is exchanged at each of its turns.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import numpy as np
import torch
from torch import _tensor_str
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nnsight_pp.errors import NotSupportedError, Where, explain

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from nnsight_pp.core.block import Block

_AUTOCAST = ("cpu", "cuda")


class OfProcess(NamedTuple):
    """Settings that torch keeps once for a process.

    Attributes:
        precision: Of float32 matrix products, in torch's words.
        is_deterministic: Whether operations must be so.
        only_warns: Whether those that are not only warn.
        printing: How tensors are written as text.
    """

    precision: str
    is_deterministic: bool
    only_warns: bool
    printing: tuple[tuple[str, Any], ...]

    @classmethod
    def now(cls) -> Self:
        """Return those of this process. Cost: a microsecond."""
        return cls(
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            # Source: torch 2.13, torch/_tensor_str.py: what `set_printoptions` sets is read by
            # no function.
            tuple(vars(_tensor_str.PRINT_OPTS).items()),
        )

    def put(self) -> None:
        """Make them those of this process."""
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        vars(_tensor_str.PRINT_OPTS).update(self.printing)


class Surroundings(NamedTuple):
    """Settings that a block sees.

    Attributes:
        grad_enabled: Whether torch keeps a graph.
        dtype: What torch makes floating-point tensors of, where nothing is said.
        device: The kind of device that it makes them on.
        of_process: What else torch keeps.
        numpy: How numpy treats floating-point errors, and how it writes arrays.
    """

    grad_enabled: bool
    dtype: torch.dtype
    device: str
    of_process: OfProcess
    numpy: tuple[dict[str, Any], dict[str, Any]]

    @classmethod
    def now(cls) -> Self:
        """Return those of this thread. Cost: 4 microseconds."""
        return cls(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device().type if torch._C._len_torch_function_stack() else "cpu",
            OfProcess.now(),
            (dict(np.geterr()), dict(np.get_printoptions())),
        )

    def set_numpys(self) -> None:
        """Set in the current context what numpy keeps for one.

        Source: numpy 2, numpy/_core/_ufunc_config.py and printoptions.py: they are context
        variables.
        """
        errors, printing = self.numpy
        if errors != np.geterr():
            np.seterr(**errors)
        if printing != np.get_printoptions():
            np.set_printoptions(**printing)

    def managers(self) -> list[AbstractContextManager[Any]]:
        """Return what must be entered around the block, in this process.

        An accelerator of the user's process stands for that of this one.
        """
        if self.device == "meta":
            return [torch.device("meta")]
        if self.device != "cpu" and torch.cuda.is_initialized():
            return [torch.device("cuda", torch.cuda.current_device())]
        return []


@final
class Exchanged:
    """One worker's settings of the process. Enter it for each turn of the worker."""

    __slots__ = ("_drivers", "_own")

    def __init__(self, own: OfProcess) -> None:
        self._own = self._drivers = own

    def __enter__(self) -> Self:
        """Put the worker's settings in force."""
        self._drivers = OfProcess.now()
        self._own.put()
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the worker's settings, and put the driver's in force."""
        self._own = OfProcess.now()
        self._drivers.put()


def managers_of_thread() -> list[AbstractContextManager[Any]]:
    """Return what must be entered in a worker of this thread, so that its block sees it too.

    That is autocast, and a default device. Cost: 0.1 microseconds where there is neither.
    """
    managers: list[AbstractContextManager[Any]] = []
    if torch._C._is_any_autocast_enabled():
        managers += [
            torch.autocast(
                kind,
                dtype=torch.get_autocast_dtype(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in _AUTOCAST
            if torch.is_autocast_enabled(kind)
        ]
    if torch._C._len_torch_function_stack():
        managers.append(torch.get_default_device())
    return managers


def within(
    managers: list[AbstractContextManager[Any]], run: Callable[[], None]
) -> Callable[[], None]:
    """Return ``run`` with ``managers`` entered around it."""
    if not managers:
        return run

    def run_within() -> None:
        with ExitStack() as stack:
            for one in managers:
                stack.enter_context(one)
            run()

    return run_within


def with_usual_device() -> AbstractContextManager[Any]:
    """Let torch make tensors on the CPU by default: an engine's own code expects that."""
    return torch.device("cpu") if torch._C._len_torch_function_stack() else nullcontext()


def check_modes(block: Block) -> None:
    """Refuse what is in force around ``block`` and does not reach the processes of an engine.

    Raises:
        NotSupportedError: Autocast, or a mode of torch that sees every operation.
    """
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = [type(one).__qualname__ for one in modes if not isinstance(one, DeviceContext)]
    if torch._C._is_any_autocast_enabled():
        names.append("torch.autocast")
    for name in names:
        raise NotSupportedError(
            explain(
                f"The trace stands inside `{name}`.",
                where=Where(block.filename, block.first_line - 1, block.name),
                why="The model and the block run in the engine's processes, and it does not reach "
                "them.",
                todo="Put it into the block, around what it is for. The model's own dtype is that "
                "of `VLLM(..., dtype=...)`.",
            )
        )
