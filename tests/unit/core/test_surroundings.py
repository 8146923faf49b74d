"""What a block sees of its process beyond its names, here and where that is another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_pp import NNsight, save
from nnsight_pp.core.surroundings import Surroundings, within
from nnsight_pp.interleave.randomness import Randomness


@contextmanager
def set_by_the_user() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_printoptions(precision=2, sci_mode=False)
    try:
        with torch.device("meta"), np.errstate(divide="raise"), np.printoptions(precision=3):
            yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_printoptions(profile="default")


def settings() -> dict[str, Any]:
    return {
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "text": str(torch.tensor([1.23456, 100000.0], device="cpu")),
        "device": torch.zeros(1).device.type,
        "divide": np.geterr()["divide"],
        "array": str(np.array([1.23456])),
    }


def test_a_worker_elsewhere_has_the_users_settings_in_its_turns_and_nobody_else_does():
    fresh = settings()
    with set_by_the_user():
        users = settings()
        sent = pickle.dumps(Surroundings.now())
    assert all(users[name] != fresh[name] for name in fresh)
    assert settings() == fresh

    around: Surroundings = pickle.loads(sent)
    seen = []
    context = copy_context()
    context.run(around.set_numpys)
    run = within(around.managers(), lambda: seen.append(settings()))
    randomness = Randomness(1, python=False, numpy=False, settings=around.of_process)
    for _ in range(2):
        with randomness:
            context.run(run)
        assert settings() == fresh
    assert seen == [users, users]


def test_a_setting_that_a_worker_changes_is_its_own_until_it_ends():
    fresh = Surroundings.now()
    randomness = Randomness(
        1, python=False, numpy=False, settings=fresh.of_process._replace(precision="high")
    )
    with randomness:
        torch.set_float32_matmul_precision("medium")
    assert Surroundings.now() == fresh
    with randomness:
        assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("part", ["block", "backward"])
def test_autocast_and_a_default_device_reach_a_block_of_this_process(part: str):
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    x = torch.ones(2, 4)
    eye = torch.eye(4)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), model.trace(x):
        before = save([(eye @ eye).dtype, torch.zeros(1).device.type])
        hidden = model[0].output
        after = save([(eye @ eye).dtype, torch.zeros(1).device.type])
        if part == "backward":
            loss = model[1].output.sum()
            with loss.backward():
                hidden.grad.save()
                after = save([(eye @ eye).dtype, torch.zeros(1).device.type])
    assert before == after == [torch.bfloat16, "meta"]
    assert torch.zeros(1).device.type == "cpu"
    assert (eye @ eye).dtype == torch.float32
