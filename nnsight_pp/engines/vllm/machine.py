"""What the CPU build of vLLM needs from the machine, found out and set for the user.

* One entry of cores per rank, or vLLM refuses to start with more than one.
* An explicit size of the KV cache, or vLLM reserves nearly all memory for each rank.
* Ranks that are spawned must not run the user's main module again.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from vllm import envs

from nnsight_pp.engines.vllm import compat
from nnsight_pp.errors import ConfigurationError, MachineError, explain

if TYPE_CHECKING:
    from collections.abc import Iterator

_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_MIN_KV_BYTES = 256 << 20
# How many sequences of full length the KV cache holds when the user does not say.
_SEQUENCES = 16
_BYTES_PER_RANK = 1 << 30
# Deprecations inside vllm 0.32.0, printed once by every rank.
_QUIET = (
    (FutureWarning, "vllm.triton_utils.dispatcher"),
    (UserWarning, "vllm.distributed.device_communicators.cpu_communicator"),
)


def core_binding(num_ranks: int, cores: list[int]) -> str:
    """Return the cores of each rank, in vLLM's form; ranks share cores when there are too few.

    >>> core_binding(2, [0, 1, 2, 3])
    '0,1|2,3'
    >>> core_binding(3, [0, 1])
    '0|1|0'
    """
    if num_ranks >= len(cores):
        return "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
    each = len(cores) // num_ranks
    groups = [cores[rank * each : (rank + 1) * each] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def kv_cache_bytes(config: Any, num_stages: int, tp_size: int, max_model_len: int) -> int:
    """Return how much KV cache a rank needs for some full-length sequences.

    Args:
        config: The model's Hugging Face text configuration.
        num_stages: How many stages share the layers.
        tp_size: How many ranks split each layer.
        max_model_len: Tokens of the longest sequence.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = -(-config.num_hidden_layers // num_stages)
    per_token = 2 * layers * -(-heads // tp_size) * size * 4
    return max(_MIN_KV_BYTES, _SEQUENCES * max_model_len * per_token)


def check_machine(num_ranks: int, kv_bytes: int, *, is_sized_by_user: bool) -> None:
    """Raise `MachineError` where the memory cannot hold the ranks."""
    available = psutil.virtual_memory().available
    wanted = num_ranks * (kv_bytes + _BYTES_PER_RANK)
    if wanted > available:
        hint = "kv_cache_memory_bytes" if is_sized_by_user else "max_model_len"
        raise MachineError(
            explain(
                f"{num_ranks} ranks need about {wanted / 2**30:.1f} GiB of memory, and "
                f"{available / 2**30:.1f} GiB are available.",
                why=f"Each holds {kv_bytes / 2**30:.2f} GiB of KV cache and about "
                f"{_BYTES_PER_RANK / 2**30:.0f} GiB beside the weights.",
                todo=f"Use fewer ranks or a smaller {hint}.",
            )
        )


def check_rotary_kernel(config: Any) -> None:
    """Refuse latent attention with vLLM's own rotary kernel for CPUs, which is wrong for it.

    Source: vllm 0.32.0 layers/rotary_embedding/base.py:forward_cpu; layers/mla.py gives it a slice
    of the queries, as if they lay side by side. The scaled embeddings of DeepSeek's own checkpoints
    do not use it. `custom_op.py` says which operations are vLLM's own.
    """
    own = config.compilation_config.custom_ops
    is_native = "none" in own or "-rotary_embedding" in own
    rope = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    is_plain = rope.get("rope_type", "default") == "default"
    if config.model_config.use_mla and is_plain and not is_native:
        raise ConfigurationError(
            explain(
                "vLLM's rotary kernel for CPUs is wrong for the latent attention of this model.",
                why="With and without tracing, its attention would differ from the model's.",
                todo='Give `compilation_config={"custom_ops": ["none"]}`.',
            )
        )


def latent_attention(config: Any) -> dict[str, Any]:
    """Return the argument that has latent attention computed alike on every CPU.

    Source: vllm 0.32.0 platforms/cpu.py:get_attn_backend_cls takes another backend for it where the
    processor has AMX, which packs the weights, and does not start in float32.
    """
    if not config.model_config.use_mla or config.attention_config.backend is not None:
        return {}
    return {"attention_backend": compat.CPU_LATENT_ATTENTION}


@contextmanager
def cpu_environment(num_ranks: int) -> Iterator[None]:
    """Set what vLLM's CPU backend reads from the environment, unless the user has."""
    names = {
        _BIND: core_binding(num_ranks, sorted(os.sched_getaffinity(0))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    with _set_by_default(names if num_ranks > 1 else {}):
        yield


@contextmanager
def engine_environment() -> Iterator[None]:
    """Choose vLLM's V1 runner and spawned processes, quiet unless the user wants its log."""
    names = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": ",".join(f"ignore::{kind.__name__}:{module}" for kind, module in _QUIET),
    }
    with _set_by_default(names), _environment_as_it_is(), warnings.catch_warnings():
        # For an engine in this process, which reads no PYTHONWARNINGS any more.
        for kind, module in _QUIET:
            warnings.filterwarnings("ignore", category=kind, module=module)
        yield


@contextmanager
def _environment_as_it_is() -> Iterator[None]:
    """Let vLLM read the environment of now: an engine in this process has it read once for all.

    Source: vllm 0.32.0 v1/engine/core.py calls `envs.enable_envs_cache`. The ranks of a second
    engine would be bound to the first one's cores ("Not enough allowed NUMA nodes").
    """
    is_kept = envs._is_envs_cache_enabled()
    envs.disable_envs_cache()
    try:
        yield
    finally:
        if is_kept:
            envs.enable_envs_cache()


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Give this process its random numbers back: an engine in it seeds them at the start.

    Source: vllm 0.32.0 v1/worker: `init_device` and `compile_or_warm_up_model` seed the process.
    """
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


@contextmanager
def _set_by_default(names: dict[str, str]) -> Iterator[None]:
    fresh = [name for name in names if name not in os.environ]
    try:
        for name in fresh:
            os.environ[name] = names[name]
        yield
    finally:
        for name in fresh:
            os.environ.pop(name, None)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Let processes that are spawned inside start without the user's main module.

    multiprocessing runs the parent's main module again in each child, which is why scripts need a
    `__main__` guard. The ranks need nothing of it: blocks travel as source. They run `spawned`.
    """
    main = sys.modules["__main__"]
    stand_in = ModuleType("__main__")
    stand_in.__spec__ = ModuleSpec("nnsight_pp.engines.vllm.spawned", None)
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main
