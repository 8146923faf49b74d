"""Blocks of the engine tier on devices whose ranks Ray starts, one stage on each.

On one machine `ray start --head` is enough; on two the second joins it first, as
`docs/how-to/two_nodes.md` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends import VLLM_OPS, Local
from engine.blocks import BLOCKS
from engine.compare import assert_same
from nnsight_pp import VLLM

pytest.importorskip("ray")
NAMES = (
    "read_on_every_stage",
    "early_value_into_a_late_layer_in_the_same_step",
    "late_value_into_an_early_layer_at_the_next_step",
    "a_logit_lens_on_every_layer",
)


class OnRay:
    """What a block of the table takes, on an engine of two Ray actors."""

    name = "vllm-2-ray"
    ops = VLLM_OPS

    def __init__(self, path: str) -> None:
        self.model = VLLM(
            path,
            pipeline_parallel_size=2,
            distributed_executor_backend="ray",
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            gpu_memory_utilization=0.4,
        )
        self.tokenizer = self.model.tokenizer
        self.layers = list(self.model.model.layers)

    def trace(self, prompt: str, steps: int = 1) -> Any:
        return self.model.trace(prompt, temperature=0.0, max_tokens=steps)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[OnRay]:
    import ray

    ray.init(address="auto", ignore_reinit_error=True)
    if ray.cluster_resources().get("GPU", 0) < 2 and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices in the Ray cluster")
    engine = OnRay(str(smollm2_path))
    try:
        yield engine
    finally:
        engine.model.close()
        ray.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_block(name: str, engine: OnRay, local: Local) -> None:
    with local.context():
        wanted = BLOCKS[name](local)
    assert_same(BLOCKS[name](engine), wanted, name)
    assert set(engine.model.request_counts()) == {0}


def test_a_large_save_comes_back_from_another_process(engine: OnRay) -> None:
    model, layers = engine.model, engine.layers
    with engine.trace("one two three " * 60):
        early = [layer.mlp.gate_up_proj.output[0] for layer in layers[:20]].save()
        late = layers[-1].mlp.output.save()
    assert len(early) == 20
    assert late.shape[0] == early[0].shape[0]
    assert set(model.request_counts()) == {0}
