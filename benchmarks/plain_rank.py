"""Plain vLLM's rank, and on it what somebody would write by hand to read and steer: the floor.

The hooks are torch's, on layers that return a stream in two parts, as vLLM's Llama does. They keep
each request's own rows, and one remote call brings them in. Without hooks it is plain vLLM.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from nnsight_pp.engines.vllm import compat


class PlainRank(compat.worker_base()):  # type: ignore[misc]
    """vLLM's own rank, which can be given hooks."""

    bench_handles: list[Any]
    bench_kept: dict[str, list[tuple[int, Any]]]

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does; then let a later stage have the buffers that it receives into.

        Source: vllm 0.32.0 makes them in a dummy run (v1/worker/gpu_model_runner.py:_dummy_run),
        which it leaves out in eager mode on CPUs: the first request of two stages would fail.
        """
        times = super().compile_or_warm_up_model()
        self.bench_handles, self.bench_kept = [], {}
        with torch.inference_mode():
            self.model_runner._dummy_run(1, is_profile=True)
        return times

    def bench_read(self, layers: list[int], is_last: bool) -> None:
        """Keep the streams behind ``layers``, of all tokens of a step or the last one."""
        kept, runner = self.bench_kept, self.model_runner

        def keep(index: int, out: Any) -> None:
            hidden, residual = out
            batch, ends = runner.input_batch, runner.query_start_loc.np
            stream = None if is_last else hidden + residual
            for row, request in enumerate(batch.req_ids[: batch.num_reqs]):
                first, end = int(ends[row]), int(ends[row + 1])
                if stream is None:
                    value = hidden[end - 1 : end] + residual[end - 1 : end]
                else:
                    value = stream[first:end]
                kept.setdefault(request, []).append((index, value))

        self._put_on(layers, keep)

    def bench_steer(self, layers: list[int], push: bytes) -> None:
        """Add a vector to the streams of each request, behind ``layers``."""
        vector, runner = pickle.loads(push), self.model_runner

        def add(_: int, out: Any) -> None:
            hidden = out[0]
            batch, ends = runner.input_batch, runner.query_start_loc.np
            for row in range(batch.num_reqs):
                hidden[int(ends[row]) : int(ends[row + 1])] += vector

        self._put_on(layers, add)

    def _put_on(self, layers: list[int], call: Any) -> None:
        modules = self.model_runner.get_model().model.layers
        for index in layers:
            # A layer of another stage stands here as an empty place, and is never called.
            handle = modules[index].register_forward_hook(
                lambda module, args, out, index=index: call(index, out)
            )
            self.bench_handles.append(handle)

    def bench_collect(self) -> bytes:
        """Return what was kept, by request; take the hooks off."""
        for handle in self.bench_handles:
            handle.remove()
        is_first = compat.place_of_this_rank().tp_rank == 0
        kept = {
            request: [(index, value.numpy()) for index, value in values]
            for request, values in self.bench_kept.items()
            if is_first
        }
        self.bench_handles.clear()
        self.bench_kept.clear()
        return pickle.dumps(kept, protocol=5)
