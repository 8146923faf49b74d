import threading

import pytest
import torch

from nnsight_pp import OutOfOrderError, ValueUnavailableError
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.report import Elsewhere, Report
from nnsight_pp.trace.raised import exception_of
from nnsight_pp.wire.report_codec import (
    decode_reports,
    encode_reports,
    failure_of,
    user_frames,
    without_remote,
)


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
    (back,) = decode_reports(encode_reports([report]))
    assert torch.equal(back.saved["x"], torch.ones(2))
    assert (back.request, back.stage, back.trace) == ("r", 1, "t")
    assert (back.grown, back.warnings) == ({"y": [Elsewhere()]}, ("careful",))
    assert (back.trail, back.statistics) == ((4, 77), {"0": 3})


@pytest.mark.parametrize("where", ["saved", "grown"])
def test_value_that_cannot_be_sent_becomes_the_failure_and_the_rest_is_sent(where):
    names = {"lock": threading.Lock(), "fine": 1}
    (back,) = decode_reports(
        encode_reports([Report("r", 0, **{where: names}, statistics={"a": 1})])
    )
    assert getattr(back, where) == {"fine": 1}
    assert back.failure is not None
    assert "'lock' (lock) cannot leave the engine" in back.failure.text
    assert back.statistics == {"a": 1}
    assert isinstance(exception_of(back.failure), ValueUnavailableError)


def test_remote_leaves_are_left_to_their_owner():
    class Remote(RemoteValue):
        pass

    assert without_remote([1, (Remote(), {"a": Remote()})]) == [
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
