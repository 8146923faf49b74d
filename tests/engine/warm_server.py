"""What the server of `warm_start` imports before it is asked for a process."""

from __future__ import annotations

import gc

import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor

import nnsight_pp.engines.vllm.rank  # noqa: F401
from engine.warm_start import RankContext

vllm.v1.executor.multiproc_executor.get_mp_context = RankContext  # type: ignore[assignment]
# Collections in a forked process would copy what it shares with this one.
gc.collect()
gc.freeze()
