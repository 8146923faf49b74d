"""How objects from around a block have changed on a rank, and the same change at home."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nnsight_pp.engines.vllm.outer import change_of, located, make_change, states_of


def brought_home(names: dict[str, Any], block: str) -> dict[str, Any]:
    """Run ``block`` on a copy of ``names``, as a rank does; return ``names`` with its changes."""
    theirs = copy.deepcopy(names)
    states = states_of(theirs, set())
    exec(block, {}, theirs)
    changes = [
        one for name, before in states.items() for one in located(names[name], change_of(before))
    ]
    for target, change in changes:
        make_change(target, change)
    return names


CHANGES = {
    "a list grows": ("one.append(3)", {"one": [1, 2]}),
    "a list gets shorter": ("del one[0]", {"one": [1, 2]}),
    "a list in a dict grows": ("one['a'].append(3)", {"one": {"a": [], "b": [1]}}),
    "a dict in a list": ("one[1]['k'] = 5; del one[1]['gone']", {"one": [0, {"gone": 1}]}),
    "a set in a tuple": ("one[0].add(4)", {"one": ({1, 2}, "x")}),
    "a list in a list in a dict": ("one['a'][0].append(7)", {"one": {"a": [[1]]}}),
    "an inner list is replaced, and the old one grows": (
        "old = one['a']; one['a'] = [9]; old.append(1); two.append(old)",
        {"one": {"a": [0]}, "two": []},
    ),
    "a dict loses a list that grows": ("one.pop('a').append(1); one['b'] = 2", {"one": {"a": []}}),
    "a list is moved by another change": ("one.insert(0, [5]); one[1].append(6)", {"one": [[1]]}),
}


@pytest.mark.parametrize(("block", "names"), CHANGES.values(), ids=CHANGES)
def test_change_is_made_at_home_as_on_the_rank(block: str, names: dict[str, Any]):
    expected = copy.deepcopy(names)
    exec(block, {}, expected)
    found = brought_home(names, block)
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_the_users_own_inner_objects_are_changed():
    inner: list[int] = []
    brought_home({"one": {"a": inner}}, "one['a'].append(3)")
    assert inner == [3]


def test_what_two_names_share_is_changed_once():
    inner: list[int] = []
    names = {"one": {"a": inner}, "two": inner}
    brought_home(names, "two.append(3); one['a'].append(4)")
    assert inner == [3, 4]


def test_a_tensor_in_a_list_is_edited_in_place():
    tensor = torch.zeros(3)
    brought_home({"one": [tensor, torch.ones(2)]}, "one[0][1] = 5.0")
    assert tensor.tolist() == [0.0, 5.0, 0.0]


def test_a_list_that_holds_itself_ends():
    one: list[Any] = [1]
    one.append(one)
    brought_home({"one": one}, "one[1].append(2)")
    assert one[2] == 2
    assert one[1] is one


def test_nothing_is_told_of_what_has_not_changed():
    names: dict[str, Any] = {"one": {"a": [torch.ones(2)], "b": ({1},)}, "two": 3}
    states = states_of(names, set())
    assert [change_of(before) for before in states.values()] == [[]]


def test_what_is_told_elsewhere_is_left_out():
    inner: list[int] = []
    known: set[int] = set()
    assert list(states_of({"one": [inner]}, known)) == ["one"]
    assert states_of({"two": inner}, known) == {}
