"""Two workers park inside `torch.ops`, whose binding keeps a per-thread list of C++ frames.

They come back in the order in which they parked, so the list is not taken down in the order
in which it was built.
"""

from __future__ import annotations

from typing import Any

import greenlet
import torch

from nnsight_pp.interleave import thread_state

state = thread_state.load()


def filled(args: Any, value: torch.Tensor) -> Any:
    """Put the served value where the lazy ones stand."""
    if isinstance(args, (tuple, list)):
        return type(args)(filled(arg, value) for arg in args)
    return value if isinstance(args, Lazy) else args


class Lazy:
    """Parks when torch meets it, then computes with what it was served."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = greenlet.getcurrent().parent.switch()
        return func(*filled(args, value), **(kwargs or {}))


def block() -> list[float]:
    return torch.ops.aten.relu(Lazy()).tolist()


workers = [(state.new_slot(True), greenlet.greenlet(block)) for _ in range(3)]
for slot, worker in workers:
    state.switch(slot, worker, ())
torch.ops.aten.relu(torch.ones(1))
for slot, worker in workers:
    result = state.switch(slot, worker, (torch.tensor([-1.0, 1.0]),))
    assert result == [0.0, 1.0], result
torch.ops.aten.relu(torch.ones(1))
print("ok")
