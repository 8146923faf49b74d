"""Which words a block may mention in what it calls, told anew where it calls something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_pp.interleave import reach
from nnsight_pp.interleave.reach import may_mention

WORDS = frozenset({"data"})
CODE = compile("f(x)", "user.py", "exec")


def raw(x: Any) -> Any:
    return x.data


def calls_raw(x: Any) -> Any:
    return raw(x)


def plain(x: Any) -> Any:
    return x + 1


def closing_over(function: Any) -> Any:
    return lambda x: function(x)


class Callable:
    def __call__(self, x: Any) -> Any:
        return raw(x)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (raw, True),
        (plain, False),
        (calls_raw, True),
        ([plain, raw], True),
        ([plain, [raw]], True),
        (Callable(), True),
        (closing_over(raw), True),
        (closing_over(plain), False),
    ],
)
def test_the_answer_is_that_of_the_functions(function: Any, wanted: bool):
    for _ in range(2):
        found = may_mention(CODE, {"f": function, "x": torch.ones(1)}, ["f", "x", "gone"], WORDS)
        assert found == wanted


def test_the_same_functions_are_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    code = compile("f(x) + 1", "user.py", "exec")
    assert may_mention(code, {"f": raw, "x": 1}, ["f", "x"], WORDS)
    monkeypatch.setattr(reach, "mentions", None)
    assert may_mention(code, {"f": raw, "x": 2}, ["f", "x"], WORDS)
