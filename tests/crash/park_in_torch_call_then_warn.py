"""Workers park inside torch calls; the model then warns, allocates and runs a collective."""

from __future__ import annotations

from typing import Any

import greenlet
import torch

from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension

state = thread_state.load()
extension = load_extension()


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
    rows = []
    for _ in range(10):
        rows.append(float(torch.ones_like(Lazy()).sum()))
        rows.append(float((torch.ones(3) + Lazy()).sum()))
        rows.append(float(torch.cat([torch.ones(1), Lazy()]).sum()))
    return rows


def model_runs() -> None:
    extension.warn("the model warns")
    layer = torch.nn.Linear(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            torch.distributed.all_reduce(layer(torch.ones(8, 64)))


torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
workers = [(state.new_slot(True), greenlet.greenlet(block)) for _ in range(4)]
for slot, worker in workers:
    state.switch(slot, worker, ())
for turn in range(30):
    model_runs()
    for slot, worker in workers:
        result = state.switch(slot, worker, (torch.full((3,), 2.0),))
        if turn == 29:
            assert result == [3.0, 9.0, 7.0] * 10, result
assert all(worker.dead for _, worker in workers)
extension.warn("the model warns again")
torch.distributed.destroy_process_group()
print("ok")
