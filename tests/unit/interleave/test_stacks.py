"""What SIGUSR1 prints."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from nnsight_pp.core.location import Location
from nnsight_pp.core.standing import Standing
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.stacks import print_on_signal, report_of, standing_of
from nnsight_pp.interleave.worker import Worker, current_worker

PLACE = Location("model.layers.3", "output")


@pytest.fixture
def turns() -> Iterator[Interleaver]:
    switch = thread_state.load()
    turns = Interleaver(StepClock(), switch, where="stage 0")

    def a_block_of_the_user() -> None:
        worker = current_worker("it")
        worker.turns.read(worker, PLACE)

    turns.add(Worker("r1", a_block_of_the_user, __file__, switch.new_slot(False)))
    turns.open_step("r1", 0)
    yield turns
    turns.drop("r1")


def test_a_parked_worker_is_shown_with_its_ask_and_its_line(turns: Interleaver):
    text = report_of(turns.workers(), "stage 0 of 2")
    assert "nnsight_pp workers on stage 0 of 2" in text
    assert "r1" in text
    assert str(PLACE) in text
    assert "worker.turns.read(worker, PLACE)" in text


def test_no_worker_is_said_so():
    assert report_of([], "stage 1").splitlines()[-1] == "none"


def test_the_signal_prints_threads_and_workers(
    turns: Interleaver, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "__stderr__", os.fdopen(os.dup(2), "w"))
    assert print_on_signal(turns.workers, "stage 0")
    try:
        assert not print_on_signal(turns.workers, "stage 0"), "a handler is left alone"
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        sys.__stderr__.close()
    printed = capfd.readouterr().err
    assert "most recent call first" in printed
    assert "a_block_of_the_user" in printed


def test_how_far_a_rank_is_names_steps_asks_and_what_it_waits_for(turns: Interleaver):
    found = standing_of(turns, "r1")
    assert found == Standing(0, -1, 1, f"parked on Read {PLACE}#0")
    turns.close_step("r1", 0)
    found = standing_of(turns, "r1")
    assert found == Standing(0, 0, 1, "failed with OutOfOrderError")
    found = standing_of(turns, "other")
    assert found == Standing(-1, -1, 0, "no block of it runs here")
