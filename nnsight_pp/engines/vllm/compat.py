"""Every name of vLLM that a version may move, in one place.

Made for vLLM 0.32. Each entry says where it stands there. What 0.33 changes is noted beside it.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import vllm
import vllm.distributed.parallel_state as groups
from vllm.config import CompilationMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as Scheduler
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.outputs import ModelRunnerOutput as ModelRunnerOutput
from vllm.v1.request import RequestStatus as RequestStatus

from nnsight_pp.envoys.serve_point import module_paths
from nnsight_pp.parallel.place import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# vllm 0.32.0 distributed/parallel_state.py: one module global per group.
_GROUP_NAMES = (
    "_WORLD", "_INNER_DP_WORLD", "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PP", "_DP", "_EP", "_EPLB",
    "_PCP",
)  # fmt: skip
VERSION: str = vllm.__version__
# What this file, and everything that calls it, was written for.
WRITTEN_FOR = "0.32"
IS_CPU = current_platform.is_cpu()
CPU_LATENT_ATTENTION = AttentionBackendEnum.CPU_MLA
# Under this name a request carries its block in `SamplingParams.extra_args`.
PAYLOAD = "nnsight_pp"
# The stored edits that run beside it.
EDITS = "nnsight_pp edits"
# And under this one the name of those that must run in the same steps.
COMPANY = "nnsight_pp_company"


def worker_base() -> type:
    """Return vLLM's own class of the processes that hold the model, for this platform."""
    if IS_CPU:
        return import_module("vllm.v1.worker.cpu_worker").CPUWorker
    return import_module("vllm.v1.worker.gpu_worker").Worker


def place_of_this_rank() -> Place:
    """Return where this process stands. Call it after vLLM's groups were made."""
    stages, tp = groups.get_pp_group(), groups.get_tp_group()
    return Place(stages.rank_in_group, stages.world_size, tp.rank_in_group, tp.world_size)


def columns() -> list[list[int]]:
    """Return the global ranks of each tensor-parallel column, stage by stage.

    Source: vllm 0.32.0 parallel_state.py:initialize_model_parallel orders ranks by stage, then by
    tensor-parallel rank.
    """
    place = place_of_this_rank()
    found = [
        [stage * place.tp_size + column for stage in range(place.num_stages)]
        for column in range(place.tp_size)
    ]
    assert list(groups.get_pp_group().ranks) in found, "vLLM orders its ranks in another way"
    return found


def this_rank() -> int:
    """Return the global rank of this process."""
    return groups.get_world_group().rank


def exchange(value: Any) -> list[Any]:
    """Return every rank's ``value``, by global rank. A collective of all ranks."""
    world = groups.get_world_group()
    gathered: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(gathered, value, group=world.cpu_group)
    return gathered


def tp_group() -> Any:
    """Return vLLM's group of the ranks that split each layer of this stage.

    Source: vllm 0.32.0 distributed/parallel_state.py:GroupCoordinator.
    """
    return groups.get_tp_group()


def real_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules that this rank really has, by path.

    Source: vllm 0.32.0 models/utils.py:PPMissingLayer stands where another stage's module would.
    """
    return {
        path: module
        for path, module in module_paths(model).items()
        if not isinstance(module, PPMissingLayer)
    }


class _LoneGroup:
    """Stands for torch's group below such a group: mixtures of experts ask it for their place.

    Source: vllm 0.32.0 model_executor/models/mixtral.py:MixtralMoE.
    """

    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


class _OneRank:
    """Stands for every group of a world of one, while a tree is built on the meta device."""

    world_size = 1
    rank = rank_in_group = local_rank = 0
    first_rank = last_rank = 0
    is_first_rank = is_last_rank = True
    ranks = (0,)
    device_group = cpu_group = _LoneGroup()
    unique_name = "nnsight_pp"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a model asked its parallel group for {name!r} while being built")


@contextmanager
def _one_rank_world() -> Iterator[None]:
    """Let vLLM's layers believe in a world of one process. No group is made or touched."""
    kept = {name: getattr(groups, name) for name in _GROUP_NAMES if hasattr(groups, name)}
    ropes = dict(rotary_embedding._ROPE_DICT)
    stub = _OneRank()
    try:
        # A rotary embedding on the meta device must never be found by a real model, nor the
        # other way round: vllm 0.32.0 layers/rotary_embedding/__init__.py:get_rope caches them.
        rotary_embedding._ROPE_DICT.clear()
        for name in kept:
            setattr(groups, name, stub)
        yield
    finally:
        for name, value in kept.items():
            setattr(groups, name, value)
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(ropes)


def meta_model(vllm_config: Any) -> torch.nn.Module:
    """Return the whole model, as one process would hold it, on the meta device.

    Cost: no weights; some 50 ms for 30 layers.
    """
    # Layers register themselves here, refuse a name twice, and may hold what cannot be copied.
    layers = vllm_config.compilation_config.static_forward_context
    config = copy.deepcopy(vllm_config, {id(layers): {}})
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = parallel.world_size = 1
    parallel.rank = 0
    parallel.enable_expert_parallel = False
    config.compilation_config.static_all_moe_layers = []
    config.compilation_config.mode = CompilationMode.NONE
    with (
        _one_rank_world(),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        return initialize_model(vllm_config=config)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part in a step, from the scheduler's output: alike on every rank.

    Attributes:
        request: vLLM's own id.
        step: The round: how many tokens were sampled for it before.
        num_tokens: How many of its tokens run in this step.
        num_computed: How many were computed before.
        new: vLLM's data of a request that is scheduled for the first time, else None.
        is_resumed: Whether it was preempted and all its tokens are computed again.
    """

    request: str
    step: int
    num_tokens: int
    num_computed: int
    new: Any = None
    is_resumed: bool = False


def request_ids(output: Any) -> Iterable[str]:
    """Return the ids of the requests of a step."""
    return output.num_scheduled_tokens


def ended(output: Any) -> Iterable[str]:
    """Return the ids of the requests that have ended since the step before."""
    return output.finished_req_ids


def new_requests(output: Any) -> list[Any]:
    """Return vLLM's data of the requests that are scheduled for the first time."""
    return output.scheduled_new_reqs


def carried(new: Any, name: str = PAYLOAD) -> bytes | None:
    """Return what a new request carries for us under ``name``, from vLLM's data of it."""
    extra = None if new is None or new.sampling_params is None else new.sampling_params.extra_args
    return None if not extra else extra.get(name)


def scheduled(output: Any) -> list[Scheduled]:
    """Return the requests of a step.

    Source: vllm 0.32.0 v1/core/sched/output.py:SchedulerOutput. `num_output_tokens` is the round,
    and survives preemption.
    """
    counts = output.num_scheduled_tokens
    found = [
        Scheduled(new.req_id, 0, counts[new.req_id], new.num_computed_tokens, new)
        for new in new_requests(output)
    ]
    cached = output.scheduled_cached_reqs
    found += [
        Scheduled(
            request, step, counts[request], computed, is_resumed=request in cached.resumed_req_ids
        )
        for request, step, computed in zip(
            cached.req_ids, cached.num_output_tokens, cached.num_computed_tokens, strict=True
        )
    ]
    return found


def sequence_of(request: str) -> int:
    """Return which of a prompt's sequences ``request`` is.

    Source: vllm 0.32.0 v1/engine/parallel_sampling.py:ParentRequest.get_child_info puts the number
    before the prompt's own id, which an offline engine counts (entrypoints/common/offline.py).
    """
    number, mark, _ = request.partition("_")
    return int(number) if mark and number.isdigit() else 0


def has_stop_strings(request: Any) -> bool:
    """Whether ``request``, the scheduler's, has a block and strings at which it stops."""
    params = request.sampling_params
    return bool(params is not None and params.stop and PAYLOAD in (params.extra_args or ()))


def text_of(config: Any, request: Any) -> Any:
    """Return what finds the stop strings of ``request``, as vLLM's front end does.

    Source: vllm 0.32.0 v1/engine/detokenizer.py:IncrementalDetokenizer.update returns the string.
    """
    tokenizer = cached_tokenizer_from_config(config.model_config)
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def batch_rows(runner: Any) -> list[tuple[str, int, int]]:
    """Return request, first row and end row of each request of the running forward.

    Source: vllm 0.32.0 v1/worker/gpu_model_runner.py: `input_batch.req_ids` is the order of the
    rows, which is not the scheduler's.
    """
    batch = runner.input_batch
    starts = runner.query_start_loc.np
    return [
        (request, int(starts[index]), int(starts[index + 1]))
        for index, request in enumerate(batch.req_ids[: batch.num_reqs])
    ]


def is_compiling(vllm_config: Any) -> bool:
    """Whether an engine of this configuration compiles its model at the start."""
    return vllm_config.compilation_config.mode != CompilationMode.NONE


def precision_of(vllm_config: Any) -> float:
    """Return the relative precision to which ranks agree: on CPUs they compute alike."""
    dtype = torch.float32 if IS_CPU else vllm_config.model_config.dtype
    return torch.finfo(dtype).eps


def run_eagerly() -> Any:
    """Let nothing that torch would compile run compiled, or be compiled now, within a `with`.

    Some layers compile their own arithmetic at their first eager call, again for other shapes
    (vllm 0.32.0 model_executor/custom_op.py:maybe_compile). A step with a block never waits for
    that.
    """
    return torch.compiler.set_stance("force_eager")


def skip_compiled() -> None:
    """Let the forward that runs now pass by the compiled model.

    Source: vllm 0.32.0 compilation/decorators.py: `__call__` looks at `skip_compiled`. A CUDA graph
    is chosen before: see `TracingRunner._determine_batch_execution_and_padding`.
    """
    get_forward_context().skip_compiled = True


@contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Let calls of ``model`` pass by what was compiled, where no step of the runner is on.

    Source: vllm 0.32.0 compilation/decorators.py: `__call__` looks at `do_not_compile` first.
    """
    compiled: list[Any] = [
        module for module in model.modules() if getattr(module, "do_not_compile", None) is False
    ]
    try:
        for module in compiled:
            module.do_not_compile = True
        with run_eagerly():
            yield
    finally:
        for module in compiled:
            module.do_not_compile = False


def abort_all(llm: Any) -> None:
    """Abort every unfinished request of an offline engine.

    Source: vllm 0.32.0 v1/engine/llm_engine.py:abort_request takes the engine's own ids with
    ``internal=True``.
    """
    engine = llm.llm_engine
    unfinished = list(engine.output_processor.request_states)
    if unfinished:
        engine.abort_request(unfinished, internal=True)


def shut_down(llm: Any) -> None:
    """End the engine's processes, and close the sockets to them.

    Source: vllm 0.32.0 v1/engine/core_client.py:SyncMPClient leaves its zmq context to the garbage
    collector; its output thread must have closed its own sockets first.
    """
    core = llm.llm_engine.engine_core
    core.shutdown()
    thread = getattr(core, "output_queue_thread", None)
    if thread is not None:
        thread.join(5.0)
        if not thread.is_alive():
            core.resources.ctx.destroy(linger=0)


def has_cache(module: torch.nn.Module) -> bool:
    """Whether a call of ``module`` would touch the KV cache.

    Source: vllm 0.32.0 model_executor/layers/attention: each attention layer has its ``kv_cache``.
    """
    return any(hasattr(part, "kv_cache") for part in module.modules())


def may_hold_adapter(module: torch.nn.Module) -> bool:
    """Whether a LoRA adapter may change what ``module`` computes; alike on every rank.

    Source: vllm 0.32.0 lora/layers: what `can_replace_layer` takes.
    """
    kinds = (LinearBase, VocabParallelEmbedding, LogitsProcessor)
    return any(
        isinstance(part, kinds) or ".fused_moe" in type(part).__module__
        for part in module.modules()
    )
