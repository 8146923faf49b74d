"""What tracing adds to vLLM's model runner, whichever one it is.

A step that holds a request with a block runs eagerly, every other one as vLLM runs it: compiled, or
from a CUDA graph. Which it is follows from the scheduler's output, so all ranks choose alike.

The runner object is vLLM's own; its class is replaced by a subclass of itself after it was made,
so nothing of vLLM is patched. Each method does vLLM's work and, in a step that holds a traced
request, calls the rank's side before or after it.

Source: vllm 0.32.0 v1/worker/gpu_model_runner.py: `execute_model`, `_model_forward`,
`_determine_batch_execution_and_padding`, `sample_tokens`, `_sample`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn

from nnsight_pp.core.tree import copied
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.activations import wait_for
from nnsight_pp.engines.vllm.schedule import with_ended
from nnsight_pp.engines.vllm.shared_experts import forget_outputs, run_in_turn, shared_experts
from nnsight_pp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

    from nnsight_pp.engines.vllm.side import RankSide
    from nnsight_pp.engines.vllm.tensor_group import TensorGroup

log = logging.getLogger(__name__)


class TracingRunner:
    """Mixed into the runner's class. See the module's text."""

    nnsight_side: RankSide | None = None
    nnsight_group: TensorGroup | None = None
    nnsight_experts: Sequence[SharedExperts] = ()

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Open the step for its traced requests, then do vLLM's work.

        A later stage opens a step only when the activations of the stage before it are here: what
        another stage may answer by then does not depend on timing.
        """
        side = self.nnsight_side
        if side is not None:
            with side.reading("opening a step"):
                if side.is_concerned(scheduler_output):
                    wait_for(intermediate_tensors)
                    side.early.begin(intermediate_tensors)
                    side.begin_step(scheduler_output)
        execute = super().execute_model  # type: ignore[misc]
        output = execute(scheduler_output, intermediate_tensors, *args, **kwargs)
        if side is not None and side.is_eager and not side.is_last:
            return side.early.on_board(output)
        return output

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """Choose no CUDA graph for a step with a block: no Python of the model runs in one.

        The rows are not padded then either, on no stage: they travel with the activations.
        """
        side = self.nnsight_side
        if side is not None and side.is_eager:
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        side = self.nnsight_side
        forward = super()._model_forward  # type: ignore[misc]
        if side is None or not side.is_eager:
            return forward(*args, **kwargs)
        compat.skip_compiled()
        with compat.run_eagerly(), run_in_turn(self.nnsight_experts):
            return self._forward_with_blocks(side, forward, args, kwargs)

    def _forward_with_blocks(
        self, side: RankSide, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if not side.is_tracing:
            return forward(*args, **kwargs)
        rows: list[tuple[str, int, int]] = []
        with side.reading("looking up the rows of a step"):
            rows = compat.batch_rows(self)
            positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
            side.enter_forward(rows, positions.shape[-1])
        if not side.is_tracing:
            return forward(*args, **kwargs)
        # An exception that leaves the forward on one rank wedges the whole engine, and a block can
        # write what makes the model raise: then the step is computed again without the blocks.
        spare = copied((args, kwargs))
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            group = self.nnsight_group
            if group is not None and not group.have_all_failed(repr(error)):
                end_of_rank("the model failed on one tensor-parallel rank alone", error)
            side.model_failed(error)
            forget_outputs(self.nnsight_experts)
            return forward(*spare[0], **spare[1])
        finally:
            side.leave_forward(rows)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Offer the logits, sample, and close the step."""
        side = self.nnsight_side
        sample = super().sample_tokens  # type: ignore[misc]
        if side is None or not side.is_eager:
            return sample(*args, **kwargs)
        if not side.is_tracing:
            return with_ended(sample(*args, **kwargs), side.take_ended(), {})
        with side.reading("handing over the logits of a step"):
            state = self.execute_model_state  # type: ignore[attr-defined]
            if state is not None:
                logits = side.serve_logits(state.logits)
                self.execute_model_state = state._replace(logits=logits)
        try:
            output = sample(*args, **kwargs)
        finally:
            side.end_step()
        return with_ended(output, side.take_ended(), side.early.take())

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        side = self.nnsight_side
        output = super()._sample(*args, **kwargs)  # type: ignore[misc]
        if side is not None and side.is_tracing:
            with side.reading("handing over the samples of a step"):
                num_ids = self.model_config.get_vocab_size()  # type: ignore[attr-defined]
                output.sampled_token_ids = side.serve_samples(output.sampled_token_ids, num_ids)
        return output


def end_of_rank(what: str, error: Exception) -> NoReturn:
    """End this process, and so the engine: ``what`` failed on this rank, and maybe on it alone.

    The others wait in a collective for this one. An exception would leave them there.
    """
    log.critical(what, exc_info=error)
    logging.shutdown()
    os._exit(1)


def add_tracing(runner: Any, side: RankSide, group: TensorGroup | None) -> None:
    """Let ``runner`` trace for ``side``; ``group`` are the ranks that split its layers, if any."""
    kind = type(runner)
    for name in (
        "_model_forward",
        "_determine_batch_execution_and_padding",
        "sample_tokens",
        "_sample",
        "execute_model",
    ):
        if not hasattr(kind, name):
            raise ConfigurationError(
                f"vLLM's {kind.__name__} has no {name}: this model runner is not supported."
            )
    if not issubclass(kind, TracingRunner):
        runner.__class__ = type(f"Tracing{kind.__name__}", (TracingRunner, kind), {})
    runner.nnsight_side = side
    runner.nnsight_group = group
    runner.nnsight_experts = shared_experts(runner.get_model())
