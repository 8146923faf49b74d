"""What blocks on different copies have changed: put together, or refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from nnsight_pp.core.block import Block
from nnsight_pp.core.growth import UNKNOWN
from nnsight_pp.engines.vllm.conflicts import Made, conflict_of, in_one_order
from nnsight_pp.engines.vllm.homecoming import make_change
from nnsight_pp.engines.vllm.stored_edits import RequestEdits
from nnsight_pp.errors import NotSupportedError
from nnsight_pp.wire.block_codec import BlockMessage


def block(text: str, **names: Any) -> BlockMessage:
    return BlockMessage("t", Block("user.py", 3, f"    {text}\n", "run"), names)


def at(*places: Any, seat: int = 0) -> bytes:
    """Return dates: of a position in the first step and stage, or of step, stage and position."""
    dates = [(0, 0, one) if isinstance(one, int) else one for one in places]
    return array("q", [n for one in dates for n in (*one, 0, seat)]).tobytes()


def found(target: Any, changes: list[Any], text: str = "x") -> NotSupportedError | None:
    """Return the conflict of blocks, each in a parcel of its own, that have made ``changes``."""
    messages = [block(text, x=target) for _ in changes]
    made = [
        Made(number, message, "x", target, change)
        for number, (message, change) in enumerate(zip(messages, changes, strict=True))
        if change is not None
    ]
    return conflict_of(made, list(enumerate(messages)))


@pytest.mark.parametrize(
    ("target", "text", "changes"),
    [
        ([], "x.append(1)", [("list", {}, [1], at(0)), ("list", {}, [2], at(0))]),
        (set(), "x.add(1)", [("set", [1], []), ("set", [2], [])]),
        ({}, "x[1] = 2", [("dict", [(1, 2)], [], [], at(0)), ("dict", [(2, 2)], [], [], at(0))]),
        ([0, 0], "x[0] = 1", [("list", {0: 1}, [], b""), ("list", {1: 1}, [2], at(0))]),
        ([], "pass", [("list", {}, [1]), None]),
        (
            [],
            "x.pop()",
            [
                ("list=", []),
            ],
        ),
    ],
)
def test_what_adds_up_or_concerns_one_block_only(target: Any, text: str, changes: list[Any]):
    assert found(target, changes, text) is None


@pytest.mark.parametrize(
    ("target", "text", "changes"),
    [
        ([0], "x[0] = 1", [("list", {0: 1}, [], b""), ("list", {0: 2}, [], b"")]),
        ({}, "x[1] = 2", [("dict", [(1, 2)], [], [], at(0)), ("dict", [(1, 3)], [], [], at(0))]),
        # Put where nobody knows when, or at one stage and somewhere in it.
        ([], "f(x)", [("list", {}, [1], b""), ("list", {}, [2], at(0))]),
        ([], "x.append(1)", [("list", {}, [1], at(UNKNOWN)), ("list", {}, [2], at(0))]),
        (torch.zeros(1), "x", [("tensor", [1], [], []), ("tensor", [2], [], [])]),
        ([], "len(x)", [("list", {}, [1]), None]),
        ({"a": [1]}, "x['a']", [("dict", [(1, 2)], [], []), None]),
    ],
)
def test_what_one_block_has_not_seen_of_another(target: Any, text: str, changes: list[Any]):
    error = found(target, changes, text)
    assert error is not None
    assert str(error).startswith(f"The {type(target).__name__} that 'x' leads to was changed")
    assert "user.py:3" in str(error)


def test_memory_that_two_show_is_one():
    tensor = torch.zeros(4)
    one, other = block("x", x=tensor), block("y.sum()", y=tensor[1:])
    made = [Made(0, one, "x", tensor, ("tensor", [1], [], []))]
    assert conflict_of(made, [(0, one), (1, other)]) is not None
    assert conflict_of(made, [(0, one), (0, other)]) is None


def test_each_of_several_sequences_has_a_copy_of_its_own():
    tensor, rows = torch.zeros(4), []
    message = block("x; rows.append(len(rows))", x=tensor, rows=rows)
    change = ("tensor", [1], [], [])
    made = [Made((0, number), message, "x", tensor, change) for number in (0, 1)]
    assert "each of several sequences" in str(conflict_of(made, [((0, 0), message)]))
    change = ("list", {}, [1], at(3))
    added = [Made((0, number), message, "rows", rows, change) for number in (0, 1)]
    assert conflict_of(added, [((0, 0), message)]) is None


def dated(target: Any, *changes: Any) -> Any:
    """Return ``target`` with ``changes`` of a block each in it."""
    message = block("x", x=target)
    made = [Made(number, message, "x", target, change) for number, change in enumerate(changes)]
    assert conflict_of(made, [(number, message) for number in range(len(changes))]) is None
    for one, change in in_one_order(made):
        make_change(one, change)
    return target


def test_what_several_blocks_put_stands_in_the_order_of_one_process():
    first = ("list", {0: "z"}, ["a3", "a9", "a3'"], at(3, 9, (1, 0, 3)))
    second = ("list", {}, ["b", "b3", "b5"], at((-1, -1, -1), 3, 5, seat=1))
    assert dated(["x"], first, second) == ["z", "b", "a3", "b3", "b5", "a9", "a3'"]
    # What was there is no new key, and what nobody else was beside needs no place.
    first = ("dict", [("x", 1), ("a", 1), ("c", 1)], [], [], at(8, (1, 0, UNKNOWN)))
    second = ("dict", [("b", 2)], [], [], at(5, seat=1))
    assert list(dated({"x": 0}, first, second).items()) == [("x", 1), ("b", 2), ("a", 1), ("c", 1)]
    alone = ("list", {}, ["a", "b"], at(7, UNKNOWN))
    assert dated([], alone, ("list", {}, ["c"], at((0, 1, 2), seat=1))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("edit", "own", "is_shared"),
    [
        ("x.append(1)", "n = len(x)", True),
        ("x[0] = 1", "y = x[0]", True),
        ("x.append(1)", "x.append(2)", False),
        ("n = len(x)", "m = len(x)", False),
        ("t[0] = 1", "t[1] = 2", True),
        ("n = t + 1", "m = t + 2", False),
    ],
)
def test_a_stored_edit_and_a_block_share_what_one_changes(edit: str, own: str, is_shared: bool):
    x, t = [0], torch.zeros(2)
    edits = RequestEdits([block(edit, x=x, t=t)])
    assert edits.shares_with(block(own, x=x, t=t), may_share=True) == is_shared
    if not is_shared:
        assert not edits.shares_with(block(own, x=x, t=t), may_share=False)
        return
    with pytest.raises(NotSupportedError, match="leads to is changed in a stored edit") as caught:
        edits.shares_with(block(own, x=x, t=t), may_share=False)
    assert "user.py:3" in str(caught.value)
