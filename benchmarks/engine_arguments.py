"""What the engines of a comparison are made with: ours, and plain vLLM with the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_OURS = ("worker_cls", "scheduler_cls")


def engine_arguments(
    folder: Path, *, stages: int = 1, tp: int = 1, eager: bool = True, longest: int = 640
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `VLLM`, and those of `vllm.LLM` that it makes of them.

    The latter lack our own classes of ranks and of the scheduler, and nothing else.
    """
    from nnsight_pp import VLLM

    ours = {
        "repo_or_path": str(folder),
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": tp,
        "dtype": "float32",
        "max_model_len": longest,
        "kv_cache_memory_bytes": 256 << 20,  # five engines live at once
        "enforce_eager": eager,
    }
    made = VLLM(**ours)._arguments
    return ours, {name: value for name, value in made.items() if name not in _OURS}
