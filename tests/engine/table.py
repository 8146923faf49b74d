"""All blocks of the table, from the files that hold them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine import blocks, blocks_of_control, blocks_of_values
from engine.compare import assert_same

if TYPE_CHECKING:
    from engine.backends import Engine, Local

BLOCKS = {**blocks.BLOCKS, **blocks_of_values.BLOCKS, **blocks_of_control.BLOCKS}
# Those that run beside seven other requests with the other tests: one of each kind.
SOME_BESIDE = (
    "read_on_every_stage",
    "early_value_into_a_late_layer_in_the_same_step",
    "late_value_into_an_early_layer_at_the_next_step",
    "a_branch_on_a_late_value_before_the_next_step",
    "a_stop_that_hangs_on_a_late_value",
    "modules_skipped_at_every_step_with_values_of_other_stages",
    "a_cache_over_all_stages",
    "a_stored_edit_before_the_block",
    "a_session_that_patches_one_trace_into_the_next",
    "a_logit_lens_on_every_layer",
    "a_clean_run_patched_into_a_corrupt_one",
    "an_error_after_a_value_of_every_stage",
)
IS_WHOLE = os.environ.get("NNSIGHT_PP_MATRIX") == "1"
BESIDE = tuple(BLOCKS) if IS_WHOLE else SOME_BESIDE


def assert_block_same(name: str, engine: Engine, local: Local) -> None:
    """Fail unless the block gives on ``engine`` what it gives on ``local``, and leaves nothing."""
    with local.context():
        wanted = BLOCKS[name](local)
    assert_same(BLOCKS[name](engine), wanted, name)
    assert set(engine.model.request_counts()) == {0}
