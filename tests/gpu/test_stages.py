"""The blocks of the engine tier again on CUDA devices, one for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.backends import Engine, Local
from engine.table import assert_block_same

# Those that bring no tensor of their own along: it would be on the CPU.
NAMES = [
    "read_on_the_first_stage",
    "read_on_every_stage",
    "early_value_into_a_late_layer_in_the_same_step",
    "late_value_into_an_early_layer_at_the_next_step",
    "force_an_earlier_value_between_a_read_and_a_write",
    "a_copy_taken_before_the_edit_is_used_on_the_other_stage",
    "a_remote_value_edited_in_place_and_then_used",
    "a_bounded_loop_of_remote_reads_only",
    "logits_of_every_step",
    "an_output_replaced_by_a_remote_value",
    "a_park_inside_torch_on_a_later_value",
    "a_logit_lens_on_every_layer",
]


@pytest.fixture(scope="module", params=[1, 2], ids=["one device", "two devices"])
def engine(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Engine]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    engine = Engine(str(smollm2_path), request.param)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_block(name: str, engine: Engine, local: Local) -> None:
    assert_block_same(name, engine, local)
