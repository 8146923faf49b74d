"""Which engine arguments reach vLLM: the user's own, unchanged, whatever runs the ranks.

No engine is started. vLLM's CPU backend knows no Ray, so its configuration is made as for processes
of one machine; what vLLM is given is what is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from vllm import envs
from vllm.engine.arg_utils import EngineArgs

from nnsight_pp import VLLM, EngineError
from nnsight_pp.engines.vllm import client

GIVEN: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "dtype": "float32",
    "max_model_len": 128,
    "enforce_eager": True,
    "seed": 3,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 300,
    "max_num_scheduled_tokens": 200,
    "kv_cache_memory_bytes": 64 << 20,
    "hf_overrides": {"rope_theta": 20000.0},
    "disable_log_stats": False,
    "use_tqdm_on_load": True,
}
# What tracing needs, beside the user's own.
OURS = {"model", "worker_cls", "scheduler_cls", "async_scheduling"}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What vLLM's configuration, and then its engine, is made of."""
    found: list[dict[str, Any]] = []

    def configured(**arguments: Any) -> EngineArgs:
        found.append(arguments)
        assert {field.name for field in dataclasses.fields(EngineArgs)} >= set(arguments)
        return EngineArgs(**{**arguments, "distributed_executor_backend": "mp"})

    def started(**arguments: Any) -> Any:
        found.append({**arguments, "runner": os.environ["VLLM_USE_V2_MODEL_RUNNER"]})
        raise RuntimeError("no engine is started here")

    monkeypatch.setattr(client, "EngineArgs", configured)
    monkeypatch.setattr(client, "LLM", started)
    return found


@pytest.mark.parametrize("executor", ["ray", "mp", None])
def test_arguments_reach_vllm_unchanged(
    executor: str | None, seen: list[dict[str, Any]], tiny_llama_path: Path
) -> None:
    given = dict(GIVEN)
    if executor is not None:
        given["distributed_executor_backend"] = executor
    model = VLLM(str(tiny_llama_path), **given)
    with contextlib.closing(model), pytest.raises(EngineError, match="no engine is started here"):
        model.dispatch()
    configured, started = seen
    assert started.pop("runner") == "0"
    for arguments in (configured, started):
        assert {name: arguments[name] for name in given} == given
        assert set(arguments) - set(given) == OURS
        assert arguments["worker_cls"] == "nnsight_pp.engines.vllm.rank.RankWorker"


def test_cores_are_bound_as_this_engine_needs_beside_another_one_in_this_process(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    envs.enable_envs_cache()  # as an engine in this process does
    try:
        assert envs.VLLM_CPU_OMP_THREADS_BIND == "auto"
        model = VLLM(str(tiny_llama_path), pipeline_parallel_size=2, max_model_len=64)
        with client._environment(model._num_ranks):
            assert len(envs.VLLM_CPU_OMP_THREADS_BIND.split("|")) == 2
            assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
        assert envs.VLLM_LOGGING_LEVEL == "ERROR", "it is kept again"
    finally:
        envs.disable_envs_cache()
