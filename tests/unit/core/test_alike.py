import math
import uuid
from collections import deque
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from nnsight_pp.core.alike import Apart, Comparison, Sampled
from nnsight_pp.core.report import Elsewhere

NAN = float("nan")
# Two numbers of single precision that follow each other, and one of half of the bits.
NEIGHBOURS = (float(torch.tensor(0.1)), float(torch.tensor(0.1) + 2**-27))
UP = torch.tensor([1.0078125, 3.0])


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left):
        self.left = left


class Plain:
    def __init__(self, **held):
        self.__dict__.update(held)

    def __eq__(self, other):
        raise AssertionError("a user's own `==` is not asked")


@dataclass
class Point:
    x: object


class Color(Enum):
    RED = 1
    BLUE = 2


def cyclic(value):
    found = Plain(value=value)
    found.__dict__["itself"] = found
    return found


ALIKE = {
    "nan": (NAN, math.nan),
    "nan in a tensor": (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    "infinity": (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0])),
    "zeros of two signs": (0.0, -0.0),
    "large numbers": (1 << 200, 1 << 200),
    "texts in another order of a set": ({"a", "b", "c"}, {"c", "b", "a"}),
    "sets of objects": ({Slotted}, {Slotted(1)}),
    "objects without equality": (Slotted(1), Slotted(1)),
    "objects that hold themselves": (cyclic(1), cyclic(1)),
    "functions": (lambda: 1, lambda: 2),
    "empty tensors": (torch.empty(0, 3), torch.empty(0, 3)),
    "rounded singles": NEIGHBOURS,
    "rounded sums": (torch.tensor([100.0, 1e-6]), torch.tensor([100.00001, 2e-6])),
    "rounded to half of the bits": (torch.tensor([1.0, 3.0]).bfloat16(), UP.bfloat16()),
    "rounded, and cast afterwards": (torch.tensor([1.0, 3.5]), UP + torch.tensor([0, 0.5])),
    "rounded complex numbers": (torch.tensor([1 + 1j]), torch.tensor([1 + 1.0000001j])),
    "a rest of rounding": (1e-9, -3e-9),
    "sparse tensors": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    "arrays": (np.arange(3.0), np.arange(3.0)),
    "fractions": (Fraction(1, 3), Fraction(1, 3)),
    "paths": (Path("/a"), Path("/a")),
    "a value that another rank has": (Elsewhere(), 3),
}  # fmt: skip

APART = {
    "whole numbers": (4711, 4712, ""),
    "whole numbers as floats": (4711.0, 4712.0, ""),
    "floats": (0.25, 0.26, ""),
    "nan and a number": (NAN, 1.0, ""),
    "infinities": (math.inf, -math.inf, ""),
    "texts": ("a", "b", ""),
    "booleans": (True, False, ""),
    "kinds": (1, 1.0, ""),
    "sets": ({"a", "b"}, {"a", "c"}, ""),
    "sizes of sets": ({1}, {1, 2}, " (its length)"),
    "lists": ([1, [2, 3]], [1, [2, 4]], "[1][1]"),
    "queues": (deque([1]), deque([2]), "[0]"),
    "dicts": ({"a": {"b": 1}}, {"a": {"b": 2}}, "['a']['b']"),
    "keys": ({"a": 1}, {"b": 1}, " (a key)"),
    "slots": (Slotted(1), Slotted(2), ".left"),
    "attributes": (Plain(a=1, b=[1]), Plain(a=1, b=[2]), ".b[0]"),
    "objects that hold themselves": (cyclic(1), cyclic(2), ".value"),
    "members": (Color.RED, Color.BLUE, ""),
    "exceptions": (ValueError("a"), ValueError("b"), ".args[0]"),
    "fractions": (Fraction(1, 3), Fraction(2, 3), ""),
    "names made at random": (uuid.uuid4(), uuid.uuid4(), ""),
    "elements": (torch.tensor([[1.5, 2.5]]), torch.tensor([[1.5, 2.6]]), "[0, 1]"),
    "whole elements": (torch.tensor([2.0, 4711.0]), torch.tensor([2.0, 4712.0]), "[1]"),
    "number of one element": (torch.tensor(3), torch.tensor(4), ""),
    "infinite elements": (torch.tensor([math.inf]), torch.tensor([1.0]), "[0]"),
    "elements that are none": (torch.tensor([NAN]), torch.tensor([1.0]), "[0]"),
    "complex elements": (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), "[0]"),
    "arrays": (np.array([1, 2]), np.array([1, 3]), "[1]"),
    "numbers of numpy": (np.float64(0.25), np.float64(0.26), ""),
    "multiples by a process id": (torch.ones(3) / 3 * 70_001, torch.ones(3) / 3 * 70_002, "[0]"),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_what_two_ranks_may_say_is_alike(one, other):
    assert Comparison().apart(one, other) is None
    assert Comparison().apart([one], [other]) is None
    assert Comparison().apart(Point(one), Point(other)) is None


@pytest.mark.parametrize(("one", "other", "path"), APART.values(), ids=APART)
def test_what_two_ranks_must_not_say_is_apart(one, other, path):
    found = Comparison().apart(one, other)
    assert found is not None
    assert found.path == path
    found = Comparison().apart((Point(one),), (Point(other),))
    assert found is not None
    assert found.path == f"[0].x{path}"


def test_a_clock_is_finer_than_values_of_a_model():
    now, later = 1_764_000_000.123456, 1_764_000_000.123789
    assert Comparison().apart(now, later) is None
    timed = Comparison(reads_clock=lambda: True)
    assert timed.apart([now], [later]) == Apart("[0]", now, later)
    assert timed.apart(*NEIGHBOURS) is None


def test_a_model_of_half_precision_may_round_more():
    one, other = torch.tensor([1.0 / 3]), torch.tensor([1.01 / 3])
    assert Comparison().apart(one, other) is not None
    assert Comparison(torch.finfo(torch.bfloat16).eps).apart(one, other) is None


CANCELLED = {
    "what is left of a sum": (1.5e-3, -4.0e-3),
    "a dot product of large numbers": (4294.50439453125, 4294.49072265625),
    "a row of such": (torch.tensor([4294.504, -2e-3]), torch.tensor([4294.491, 9e-3])),
}


@pytest.mark.parametrize(("one", "other"), CANCELLED.values(), ids=CANCELLED)
def test_a_block_that_knows_nothing_of_its_rank_may_round_what_cancels(one, other):
    assert Comparison(knows_rank=lambda: False).apart(one, other) is None
    assert Comparison(knows_rank=lambda: False).apart(one, -1000 * other - 1) is not None


def test_a_dot_product_rounds_by_more_than_a_few_units():
    assert Comparison().apart(4294.50439453125, 4294.49072265625) is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70, 30)])
def test_a_sample_stands_for_its_tensor(shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    sample = Sampled.of(tensor)
    assert sample.values.numel() <= 64
    assert Comparison().apart(tensor, sample) is None
    assert Comparison().apart(torch.randn(*shape, 2), sample) is not None
    if tensor.numel():
        assert Comparison().apart({"x": tensor * 1.1}, {"x": sample}) is not None


def test_a_tensor_and_its_transpose_have_the_same_elements_in_a_sample():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert Comparison().apart(tensor, Sampled.of(tensor.T.contiguous().T)) is None
