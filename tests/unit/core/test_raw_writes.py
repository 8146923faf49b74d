"""Writes that torch does not count are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nnsight_pp.core.raw_writes import RawWrites

WRITES = {
    ".data": lambda one: one.data.add_(1),
    ".numpy()": lambda one: np.add(one.numpy(), 1, out=one.numpy()),
    "a part": lambda one: one.data[1:, :1].fill_(9),
    "a turned nan": lambda one: one.data.view(torch.int32).bitwise_xor_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_past_the_version_gives_a_new_one_once(name: str):
    value = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    raw = RawWrites()
    raw.note((value, None, [4]))
    before = value._version
    raw.count()
    assert value._version == before
    WRITES[name](value)
    raw.count()
    after = value._version
    assert after > before
    raw.count()
    assert value._version == after


def test_an_edit_that_is_counted_is_not_counted_twice():
    value = torch.zeros(3)
    raw = RawWrites()
    raw.note(value)
    value += 1
    counted = value._version
    raw.count()
    assert value._version == counted
    value.data += 1
    raw.count()
    assert value._version > counted


def test_what_counts_no_edits_is_left_alone():
    with torch.inference_mode():
        inferred = torch.zeros(3)
    raw = RawWrites()
    raw.note([inferred, torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
    raw.count()
