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
# Those that run on three stages with the other tests: where a stage between two others can matter.
SOME_ON_THREE = (
    *SOME_BESIDE,
    "force_an_earlier_value_between_a_read_and_a_write",
    "a_copy_taken_before_the_edit_is_used_on_the_other_stage",
    "a_remote_value_edited_in_place_and_then_used",
    "a_branch_on_a_remote_value",
    "a_bounded_loop_of_remote_reads_only",
    "an_output_replaced_by_a_remote_value",
    "a_park_inside_torch_on_a_later_value",
    "outer_objects_changed_by_the_block",
    "logits_changed_before_sampling",
    "a_cache_of_what_went_in_beside_a_skip_and_a_stop",
    "calls_used_on_other_stages",
    "weights_of_every_stage",
    "masks_of_another_stages_value",
    "reductions_of_every_stage",
    "a_location_is_read_again_after_it_was_assigned",
    "every_edit_in_place",
    "a_value_of_step_one_is_used_in_step_three",
    "the_last_rows_of_all_layers",
    "a_chain_through_the_stages",
    "one_row_of_an_early_layer_into_all_rows_of_a_late_one",
    "functions_and_methods_that_change_what_is_around_them",
    "writes_past_the_version_of_a_value",
    "errors_handled_in_the_block",
    "a_condition_on_a_late_value_fails",
    "the_order_of_the_model_is_the_order_of_a_block",
    "an_open_loop_that_is_left",
    "a_while_loop_on_another_stages_value",
    "a_branch_in_every_step_on_a_value_of_the_last",
    "drawn_numbers_are_alike_where_they_are_used",
    "noise_on_one_stage_is_taken_off_on_another",
)
IS_WHOLE = os.environ.get("NNSIGHT_PP_MATRIX") == "1"
BESIDE = tuple(BLOCKS) if IS_WHOLE else SOME_BESIDE
ON_THREE = tuple(BLOCKS) if IS_WHOLE else SOME_ON_THREE


def assert_block_same(name: str, engine: Engine, local: Local) -> None:
    """Fail unless the block gives on ``engine`` what it gives on ``local``, and leaves nothing."""
    with local.context():
        wanted = BLOCKS[name](local)
    assert_same(BLOCKS[name](engine), wanted, name)
    assert set(engine.model.request_counts()) == {0}
