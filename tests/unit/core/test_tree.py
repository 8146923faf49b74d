from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import leaves, map_leaves

Pair = namedtuple("Pair", "a b")


@dataclass
class Point:
    x: object
    y: object = None
    made: list = field(default_factory=list, init=False)

    def __post_init__(self):
        self.made.append(1)


@dataclass
class ModelOutput(OrderedDict):
    """A dataclass that is a dict as well, as transformers' outputs are."""

    logits: object = None
    loss: object = None

    def __post_init__(self):
        for name in ("logits", "loss"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


VALUES = {
    "leaf": 1,
    "none": None,
    "tuple": (1, (2, 3)),
    "list": [1, [2]],
    "dict": {"a": 1, "b": [2]},
    "named": Pair(1, [2]),
    "ordered": OrderedDict(b=1, a=2),
    "empty": ((), [], {}),
    "text": "text",
    "size": torch.Size([1, 2]),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_mapping_with_itself_gives_an_equal_value_of_the_same_type(value):
    mapped = map_leaves(value, lambda leaf: leaf)
    assert mapped == value
    assert type(mapped) is type(value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_leaves_come_in_the_order_in_which_they_are_mapped(value):
    seen = []
    map_leaves(value, lambda leaf: seen.append(leaf) or leaf)
    assert list(leaves(value)) == seen


def test_containers_are_rebuilt():
    value = {"a": [1, 2]}
    mapped = map_leaves(value, lambda leaf: leaf)
    mapped["a"].append(3)
    assert value == {"a": [1, 2]}


def test_dataclass_is_rebuilt_without_its_init():
    value = Point(1, [2])
    mapped = map_leaves(value, lambda leaf: leaf * 10)
    assert (mapped.x, mapped.y, mapped.made) == (10, [20], [10])


def test_dataclass_that_is_a_dict_keeps_order_items_and_fields():
    value = ModelOutput(logits=1, loss=2)
    mapped = map_leaves(value, lambda leaf: leaf * 10)
    assert list(mapped.items()) == [("logits", 10), ("loss", 20)]
    assert (mapped.logits, mapped.loss) == (10, 20)
    assert list(value.values()) == [1, 2]


def test_ordered_dict_keeps_its_order_and_a_default_dict_its_default():
    assert list(map_leaves(OrderedDict(b=1, a=2), str)) == ["b", "a"]
    mapped = map_leaves(defaultdict(list, a=1), str)
    assert mapped["a"] == "1"
    assert mapped["new"] == []


def test_named_results_of_torch_are_containers():
    value = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    mapped = map_leaves(value, lambda leaf: leaf + 1)
    assert len(list(leaves(value))) == 2
    assert (mapped.values.item(), mapped.indices.item()) == (3.0, 2)


def test_remote_value_is_a_leaf_and_is_not_asked_what_it_is():
    class Remote(RemoteValue):
        @property
        def __class__(self):
            raise AssertionError("asked")

    value = Remote()
    assert next(iter(leaves([value]))) is value
    assert map_leaves((value,), lambda leaf: leaf)[0] is value


def test_subclass_of_list_is_a_leaf():
    class Own(list):
        pass

    value = Own([1])
    assert map_leaves(value, lambda leaf: leaf) is value
    assert list(leaves(value)) == [value]
