"""Greenlet switches that keep a worker's torch state and the model's apart.

A worker may park inside a torch call, inside `torch.no_grad()`, inside autocast: what torch keeps
per thread is then the worker's, and some of it points into the worker's C stack. Every switch to a
worker therefore goes through a `ThreadState`, which exchanges that state (`csrc/thread_state.cpp`
says what it is).

`NNSIGHT_PP_TLS_SWAP=0` opts out: switches are then plain, grad and inference mode apart, and
`may_park_in_torch` is False, so that a lazy value refuses to park inside a torch call.

Not here: how the C++ comes to be compiled (extension), who switches when (interleaver), and the
context variables of a worker (worker).
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, Protocol, final

import torch

from nnsight_pp.interleave.extension import load_extension

if TYPE_CHECKING:
    from collections.abc import Callable

    import greenlet


class Slot(Protocol):
    """What is kept for one worker between its turns. Made by `ThreadState.new_slot`."""

    @property
    def is_clean(self) -> bool:
        """True while the worker has left nothing behind."""
        ...


@final
class ThreadState:
    """The way into a worker: all switches and throws of a process go through one of these.

    Call `switch` and `throw` from the driver only. Both return what the worker switched back, or
    raise what it raised, with the driver's state in force again in every case. They return to
    their caller: a worker must park by switching to the greenlet that resumed it.

    A worker that has started must be ended through `throw`; one that is merely dropped is
    unwound by the garbage collector, without an exchange.

    Attributes:
        name: `native` or `plain`.
        may_park_in_torch: Whether a worker may park inside a torch call.
        new_slot: `new_slot(grad_enabled)`, the state of a new worker: clean, grad mode as given.
        switch: `switch(slot, greenlet, args_tuple)`.
        throw: `throw(slot, greenlet, exception)`, an instance or a class.
    """

    __slots__ = ("may_park_in_torch", "name", "new_slot", "switch", "throw")

    def __init__(
        self,
        name: str,
        *,
        may_park_in_torch: bool,
        new_slot: Callable[[bool], Slot],
        # Any: a worker's arguments and results are whatever the two sides agree on.
        switch: Callable[[Any, greenlet.greenlet, tuple[Any, ...]], Any],
        throw: Callable[[Any, greenlet.greenlet, BaseException | type[BaseException]], Any],
    ) -> None:
        self.name = name
        self.may_park_in_torch = may_park_in_torch
        self.new_slot = new_slot
        # The C functions themselves, not methods around them: this is the hottest call there is.
        self.switch = switch
        self.throw = throw


def load() -> ThreadState:
    """Return this process's `ThreadState`, compiling the extension if nobody has yet.

    Call it once in the parent before ranks start, so that they find the compiled file.

    Raises:
        ExtensionBuildError: The compiler is missing or refused, or the result does not load.

    Cost: 10 ms when cached; about 10 s of g++ when not.
    """
    if os.environ.get("NNSIGHT_PP_TLS_SWAP") == "0":
        return _plain()
    return _native()


@functools.cache
def _native() -> ThreadState:
    extension = load_extension()
    switch, throw = extension.switch, extension.throw
    # CAUTION: asking whether a device is there would spoil a later fork of the parent (see
    # torch.cuda.is_available). The wrapper looks at each call whether CUDA has been started.
    if torch.version.cuda is not None or torch.version.hip is not None:
        switch, throw = _keeping_stream(switch), _keeping_stream(throw)
    return ThreadState(
        "native",
        # Where torch does not show all it keeps, a park inside it is refused, not risked.
        may_park_in_torch=not extension.unseen,
        new_slot=extension.Slot,
        switch=switch,
        throw=throw,
    )


# ---- CUDA: the device and the stream are in none of torch's thread states ----------------------


def _current_stream() -> tuple[int, int, int]:
    # Unannotated upstream; stream id, device index, device type.
    return torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())  # pyright: ignore


def _set_stream(stream: tuple[int, int, int]) -> None:
    stream_id, device_index, device_type = stream
    torch._C._cuda_setStream(  # pyright: ignore[reportAttributeAccessIssue]
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def _keeping_stream(step: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Wrap a switch so that the current device and its stream are exchanged too.

    A worker runs on the driver's stream, unless it parked inside a `torch.cuda.stream`
    or `torch.cuda.device` of its own. Only the current device's stream is looked at.
    """

    def exchange(slot: Any, worker: greenlet.greenlet, argument: Any) -> Any:
        if not torch.cuda.is_initialized():
            return step(slot, worker, argument)
        driver = _current_stream()
        if slot.stream is not None:
            _set_stream(slot.stream)
        try:
            return step(slot, worker, argument)
        finally:
            left = _current_stream()
            slot.stream = None if left == driver or worker.dead else left
            if left != driver:
                _set_stream(driver)

    return exchange


# ---- without the extension ---------------------------------------------------------------------


@final
class _PlainSlot:
    """Grad mode of one worker; the one thing that the plain switch keeps."""

    __slots__ = ("grad_enabled", "has_left")

    def __init__(self, grad_enabled: bool) -> None:
        self.grad_enabled = grad_enabled
        self.has_left = False

    @property
    def is_clean(self) -> bool:
        return not self.has_left


def _plain_step(slot: _PlainSlot, step: Callable[[], Any]) -> Any:
    driver = torch.is_grad_enabled()
    before = slot.grad_enabled
    # On the driver's side and in order, so this guard cannot be left in force by a worker.
    outside = (
        torch.inference_mode(mode=False)
        if torch.is_inference_mode_enabled()
        else contextlib.nullcontext()
    )
    with outside:
        torch._C._set_grad_enabled(before)
        try:
            return step()
        finally:
            slot.grad_enabled = torch.is_grad_enabled()
            slot.has_left = slot.has_left or slot.grad_enabled != before
            torch._C._set_grad_enabled(driver)


@functools.cache
def _plain() -> ThreadState:
    def switch(slot: _PlainSlot, worker: greenlet.greenlet, args: tuple[Any, ...]) -> Any:
        return _plain_step(slot, lambda: worker.switch(*args))

    def throw(
        slot: _PlainSlot,
        worker: greenlet.greenlet,
        exception: BaseException | type[BaseException],
    ) -> Any:
        return _plain_step(slot, lambda: worker.throw(exception))

    return ThreadState(
        "plain", may_park_in_torch=False, new_slot=_PlainSlot, switch=switch, throw=throw
    )
