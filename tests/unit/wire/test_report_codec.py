import ast
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from nnsight_pp import OutOfOrderError, ValueUnavailableError
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.report import Elsewhere, Report
from nnsight_pp.trace.raised import exception_of
from nnsight_pp.wire.homeward import Homeward
from nnsight_pp.wire.parcel import LEAST_BYTES, MOST_LEFT_BYTES, Parcel, open_parcel
from nnsight_pp.wire.report_codec import (
    decode_reports,
    encode_reports,
    failure_of,
    user_frames,
)


def sent(reports):
    parcel = Parcel()
    fetch = fetching(parcel)
    try:
        return decode_reports([b"", encode_reports(reports, parcel)], fetch)
    finally:
        assert not parcel.is_large


def fetching(*parcels):
    """Answer as the ranks would; `seen` has what was asked of them."""

    def fetch(is_wanted):
        fetch.seen.append(is_wanted)
        answers = [parcel.read() if is_wanted else b"" for parcel in parcels]
        for parcel in parcels:
            parcel.drop()
        return answers

    fetch.seen = []
    return fetch


def caught(raise_it):
    try:
        raise_it()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def block_that_raises(error):
    code = compile("\n\n\ndef inner():\n    raise error\ninner()\n", "user.py", "exec")
    return caught(lambda: exec(code.replace(co_name="run"), {"error": error}))


def test_report_comes_back():
    report = Report(
        "r",
        1,
        "t",
        {"x": torch.ones(2)},
        {"y": [Elsewhere()]},
        None,
        ("careful",),
        (4, 77),
        {"0": 3},
    )
    (back,) = sent([report])
    assert torch.equal(back.saved["x"], torch.ones(2))
    assert (back.request, back.stage, back.trace) == ("r", 1, "t")
    assert (back.grown, back.warnings) == ({"y": [Elsewhere()]}, ("careful",))
    assert (back.trail, back.statistics) == ((4, 77), {"0": 3})


@pytest.mark.parametrize("where", ["saved", "grown"])
def test_value_that_cannot_be_sent_becomes_the_failure_and_the_rest_is_sent(where):
    names = {"lock": threading.Lock(), "fine": 1}
    (back,) = sent([Report("r", 0, **{where: names}, statistics={"a": 1})])
    assert getattr(back, where) == {"fine": 1}
    assert back.failure is not None
    assert "'lock' (lock) cannot leave the engine" in back.failure.text
    assert back.statistics == {"a": 1}
    assert isinstance(exception_of(back.failure), ValueUnavailableError)


def test_remote_leaves_are_left_to_their_owner():
    class Remote(RemoteValue):
        pass

    assert Homeward()([1, (Remote(), {"a": Remote()})]) == [
        1,
        (Elsewhere(), {"a": Elsewhere()}),
    ]


def test_exception_keeps_class_message_and_the_users_lines():
    error = block_that_raises(KeyError("name"))
    failure = failure_of(error, "user.py", 1, 4)
    assert failure.frames == (("user.py", 6, "run"), ("user.py", 5, "inner"))
    assert (failure.name, failure.stage, failure.failed_at, failure.is_echo) == (
        "KeyError",
        1,
        4,
        False,
    )
    back = exception_of(failure)
    assert type(back) is KeyError
    assert back.args == ("name",)


def test_echo_of_another_stage_is_marked():
    assert failure_of(ValueUnavailableError("x"), "", 0, 0, is_echo=True).is_echo
    assert not failure_of(OutOfOrderError("x"), "", 0, 0).is_echo


def test_exception_that_cannot_be_pickled_is_told_by_name_and_text():
    class HoldingError(ValueError):
        def __init__(self, text):
            super().__init__(text)
            self.lock = threading.Lock()

    failure = failure_of(HoldingError("the text"), "", 0, 0)
    assert failure.pickled is None
    assert "HoldingError: the text" in str(exception_of(failure))


def test_exception_without_a_frame_of_the_block_has_no_lines():
    assert user_frames(caught(lambda: 1 / 0), "user.py") == ()


def large(stage, num_bytes=MOST_LEFT_BYTES):
    saved = {"x": torch.arange(num_bytes // 4, dtype=torch.int32), "odd": torch.ones(3).half()}
    return Report("r", stage, "t", saved)


def test_large_reports_are_mapped_and_leave_nothing_with_the_rank():
    parcels = [Parcel(), Parcel()]
    fetch = fetching(*parcels)
    answers = [encode_reports([large(stage)], parcels[stage]) for stage in (0, 1)]
    assert all(len(pickle.dumps(answer)) < 200 for answer in answers)
    found = decode_reports([*answers, b""], fetch)
    assert fetch.seen == [False]
    assert [one.stage for one in found] == [0, 1]
    for one in found:
        assert torch.equal(one.saved["x"], large(0).saved["x"])
        assert torch.equal(one.saved["odd"], torch.ones(3).half())
    found[0].saved["x"][0] = 7  # memory of the client's own
    assert found[1].saved["x"][0] == 0


def test_middling_reports_are_mapped_without_a_call_and_the_next_takes_their_place():
    parcel = Parcel()
    fetch = fetching(parcel)
    reports = [large(0, LEAST_BYTES), large(0, LEAST_BYTES)]
    reports[1].saved["x"].fill_(1)
    found = []
    for report in reports:
        answer = encode_reports([report], parcel)
        assert len(pickle.dumps(answer)) < 200
        found += decode_reports([answer], fetch)
        assert not parcel.is_large
    assert fetch.seen == []
    for back, report in zip(found, reports, strict=True):
        assert torch.equal(back.saved["x"], report.saved["x"])
    encode_reports([Report("r", 0, "t")], parcel)
    assert parcel.is_empty


@pytest.mark.parametrize("num_bytes", [LEAST_BYTES, MOST_LEFT_BYTES])
def test_a_hundred_reports_leave_no_file_and_no_mapping(num_bytes):
    def held():
        with open("/proc/self/maps") as file:
            return len(os.listdir("/proc/self/fd")), file.read().count("memfd:nnsight_pp")

    parcel = Parcel()
    before, report = held(), large(0, num_bytes)
    for _ in range(100):
        decode_reports([encode_reports([report], parcel)], fetching(parcel))
    parcel.drop()
    assert held() == before


def test_small_and_large_reports_of_one_collect_come_together():
    parcel = Parcel()
    small = Report("r", 0, "t", {"y": torch.ones(2)})
    answers = [encode_reports([small], Parcel()), encode_reports([large(1)], parcel)]
    found = decode_reports(answers, fetching(parcel))
    assert [one.stage for one in found] == [0, 1]


@pytest.mark.parametrize("other", [{"inode": 1}, {"mark": "0" * 32}, {"pid": 1 << 22}])
def test_a_client_that_cannot_map_asks_for_the_bytes(other):
    parcel = Parcel()
    answer = encode_reports([large(2)], parcel)
    fetch = fetching(parcel)
    (back,) = decode_reports([answer | other], fetch)
    assert fetch.seen == [True]
    back.saved["x"][0] = 7
    assert torch.equal(back.saved["x"][1:], large(2).saved["x"][1:])
    assert parcel.is_empty


def test_a_rank_without_memory_for_a_parcel_answers_with_the_bytes(monkeypatch):
    def refuse(*_):
        raise OSError("no memory")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    parcel = Parcel()
    answer = encode_reports([large(0)], parcel)
    assert type(answer) is bytes
    (back,) = decode_reports([answer], fetching(parcel))
    assert torch.equal(back.saved["x"], large(0).saved["x"])


def test_memory_of_a_parcel_goes_with_the_last_tensor():
    def mapped():
        with open("/proc/self/maps") as file:
            return sum("memfd:nnsight_pp" in line for line in file)

    before = mapped()
    found = sent([large(0)])
    assert mapped() == before + 1
    kept, small = found[0].saved["x"], found[0].saved["odd"]
    del found
    assert mapped() == before + 1
    del kept
    assert mapped() == before
    assert torch.equal(small, torch.ones(3).half())


def test_parcel_of_another_process_is_opened(tmp_path):
    script = """
import sys, torch
from nnsight_pp.core.report import Report
from nnsight_pp.wire.parcel import Parcel
from nnsight_pp.wire.report_codec import encode_reports
parcel = Parcel()
print(encode_reports([Report("r", 3, "t", {"x": torch.arange(1 << 20)})], parcel), flush=True)
sys.stdin.read()
"""
    rank = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert rank.stdout is not None
        where = ast.literal_eval(rank.stdout.readline())
        (back,) = decode_reports([where], lambda _: [])
    finally:
        rank.communicate()
    assert torch.equal(back.saved["x"], torch.arange(1 << 20))
    with pytest.raises(FileNotFoundError):
        open_parcel(where, lambda word: word)
