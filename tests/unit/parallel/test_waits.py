"""What a wait for another stage prints when its time has run out."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.location import Location
from nnsight_pp.core.standing import Standing
from nnsight_pp.errors import PullTimeoutError
from nnsight_pp.parallel.lazy import pick
from nnsight_pp.parallel.memory_link import MemoryFabric, MemoryLink

PLACE = Location("model.a", "output")


def standing(stage: int, request: str) -> Standing:
    assert request == "r"
    if stage == 1:
        raise RuntimeError("this stage cannot say")
    return Standing(3, 2, 11 + stage, f"parked on stage {stage}")


@pytest.fixture
def fabric() -> Iterator[MemoryFabric]:
    fabric = MemoryFabric(3, pick, copy.copy, standing_of=standing)
    yield fabric
    fabric.close()


def test_a_wait_in_vain_prints_steps_and_stages(
    fabric: MemoryFabric, caplog: pytest.LogCaptureFixture
):
    link = MemoryLink(fabric, 2, bound_s=0.02)
    pending = link.pull(AskKey("r", 4), 0, PLACE, 3, ())
    with pytest.raises(PullTimeoutError) as caught:
        pending.wait()
    first, *rest = str(caught.value).splitlines()
    assert first == "Stage 0 did not answer for model.a.output#3 within 0.02 s."
    cells = [[cell.strip() for cell in line.split("|")] for line in rest if "|" in line]
    assert cells[:4] == [
        ["", "stage 0", "stage 1", "stage 2"],
        ["step 2", "closed", "no answer", "closed"],
        [
            "step 3",
            "open, parked on stage 0",
            "no answer",
            "open, waits for model.a.output#3 of stage 0 <-- waiting here",
        ],
        ["asks", "11", "", "13"],
    ]
    assert "could not be told" in caplog.text
