"""Read and change what a model computes, on a model sharded over pipeline stages.

`NNsight` wraps a torch module of this process; `VLLM` a vLLM engine. Engines load when they are
first named, so importing this package imports neither vllm nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.saved import save
from nnsight_pp.core.settings import CONFIG
from nnsight_pp.envoys.attention import attention_pattern
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.envoys.served_view import eproperty
from nnsight_pp.envoys.traceable import traceable
from nnsight_pp.errors import (
    BarrierError,
    BlockError,
    BlockShapeError,
    CacheError,
    ConfigurationError,
    EarlyStopException,
    EngineDiedError,
    EngineError,
    ExtensionBuildError,
    InternalError,
    MachineError,
    NNsightDeprecationWarning,
    NNsightError,
    NotServedError,
    NotSupportedError,
    OutOfOrderError,
    OutsideTraceError,
    ParkRefusedError,
    PullTimeoutError,
    RankDivergenceError,
    RowsError,
    SaveOutsideTraceError,
    SourceNotAvailable,
    UnknownLocationError,
    ValueUnavailableError,
    WithBlockNotFoundError,
)
from nnsight_pp.interleave.barrier import Barrier
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.trace.mount import Object, mount_save

if TYPE_CHECKING:
    from nnsight_pp.engines.language import LanguageModel, TransformersModel
    from nnsight_pp.engines.local import NNsight
    from nnsight_pp.engines.vllm.client import VLLM

__version__ = "0.1.0"

_ENGINES = {
    "LanguageModel": "nnsight_pp.engines.language",
    "NNsight": "nnsight_pp.engines.local",
    "TransformersModel": "nnsight_pp.engines.language",
    "VLLM": "nnsight_pp.engines.vllm.client",
}

__all__ = [
    "CONFIG",
    "VLLM",
    "Barrier",
    "BarrierError",
    "BlockError",
    "BlockShapeError",
    "CacheError",
    "ConfigurationError",
    "EarlyStopException",
    "EngineDiedError",
    "EngineError",
    "Envoy",
    "ExtensionBuildError",
    "InternalError",
    "LanguageModel",
    "LazyRemoteTensor",
    "MachineError",
    "NNsight",
    "NNsightDeprecationWarning",
    "NNsightError",
    "NotServedError",
    "NotSupportedError",
    "Object",
    "OutOfOrderError",
    "OutsideTraceError",
    "ParkRefusedError",
    "PullTimeoutError",
    "RankDivergenceError",
    "RowsError",
    "SaveOutsideTraceError",
    "SourceNotAvailable",
    "TransformersModel",
    "UnknownLocationError",
    "ValueUnavailableError",
    "WithBlockNotFoundError",
    "attention_pattern",
    "eproperty",
    "save",
    "traceable",
]

mount_save()


def __getattr__(name: str) -> Any:
    module = _ENGINES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
