import sys
from functools import partial
from types import FrameType

import pytest

from nnsight_pp.errors import NotSupportedError
from nnsight_pp.parallel.class_check import is_asked_by_python


class Asking:
    """Notes who asks for its class."""

    def __init__(self) -> None:
        self.frames: list[bool] = []

    @property
    def __class__(self) -> type:
        frame: FrameType = sys._getframe(1)
        self.frames.append(is_asked_by_python(frame))
        return int


def c_code_asks(thing: object) -> bool:
    return partial(isinstance, thing, int)()


def test_python_is_told_from_c():
    thing = Asking()
    for _ in range(30):
        assert isinstance(thing, int)
        assert thing.__class__ is int
        c_code_asks(thing)
    assert thing.frames == [True, True, False] * 30


def test_code_without_columns_is_refused():
    code = compile("isinstance(thing, int)", "<bare>", "eval")
    lines = bytes([0b1_1101_000 | (len(code.co_code) // 2 - 1) % 8, 0])  # a line and no column
    with pytest.raises(NotSupportedError, match="without columns"):
        eval(code.replace(co_linetable=lines * 8), {"thing": Asking(), "isinstance": isinstance})
