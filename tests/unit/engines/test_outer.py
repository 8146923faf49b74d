"""How objects from around a block have changed on a rank, and the same change at home."""

from __future__ import annotations

import copy
import functools
import importlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nnsight_pp.core.block import Block, Scope
from nnsight_pp.core.report import Report
from nnsight_pp.engines.vllm.homebound import of_change
from nnsight_pp.engines.vllm.homecoming import located, make_change, own_of
from nnsight_pp.engines.vllm.outer import change_of, home_of, moved_in, states_of
from nnsight_pp.errors import NotSupportedError
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, encode_block
from nnsight_pp.wire.homeward import Homeward
from nnsight_pp.wire.merge import Home, merge_reports
from nnsight_pp.wire.report_codec import encoded
from nnsight_pp.wire.value_codec import from_bytes, in_one_piece


def brought_home(names: dict[str, Any], block: str, saved: str = "") -> dict[str, Any]:
    """Run ``block`` on a copy of ``names``, as a rank does; return ``names`` with its changes.

    The names of ``saved`` are added to them, as they come home.
    """
    message = BlockMessage("t", Block("user.py", 3, f"    {block}\n", "run"), names)
    theirs = decode_block(encode_block(message, lambda obj: None), lambda name: None).names
    states = states_of(theirs, set())
    scope = Scope(theirs)
    exec(block, scope)
    homeward = Homeward(home_of("t", states), moved_in(states))
    kept = {name: homeward(scope[name]) for name in saved.split()}
    grown = {
        name: [(path, of_change(one, homeward)) for path, one in change_of(before)]
        for name, before in states.items()
    }
    report = Report("r", 0, "t", saved=kept, grown=grown, homeward=homeward)
    own = own_of([replace(message, names=names)])
    back = from_bytes(in_one_piece(*encoded([report])), own)
    report = merge_reports(back, home=Home(own))
    assert report.failure is None
    changes = [one for name in grown for one in located(names[name], report.grown[name])]
    for target, change in changes:
        make_change(target, change)
    return {**names, **report.saved}


@dataclass
class Store:
    rows: list[Any] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    best: Any = None


@dataclass(frozen=True)
class Frozen:
    rows: list[Any]


class Total:
    total = 0
    seen: ClassVar[list[int]] = []

    @property
    def double(self) -> int:
        return 2 * self.total


class Slots:
    __slots__ = ("__own", "other", "rows")

    def __init__(self) -> None:
        self.rows, self.__own = [1], 0

    def raise_own(self) -> None:
        self.__own += 1
        self.other = self.__own

    def __eq__(self, other: object) -> bool:
        return all(
            getattr(self, name, None) == getattr(other, name, None)
            for name in ("rows", "other", "_Slots__own")
        )


class Key:
    """One like any other."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.rows == other.rows

    def __hash__(self) -> int:
        return 3


class Unlike:
    """In a set by its identity."""

    value = 0


class Guarded:
    """Counts what is set through its property, which must not happen twice."""

    def __init__(self) -> None:
        self._value, self.num_set = 0, 0

    @property
    def value(self) -> int:
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        self._value = value
        self.num_set += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guarded) and vars(self) == vars(other)


Pair = namedtuple("Pair", "first second")


class Labelled(list[Any]):
    """A list with attributes."""

    label = ""


def labelled(*items: Any) -> Labelled:
    made = Labelled(items)
    made.label = "before"
    return made


CHANGES = {
    "a list of an object": ("one.rows.append(3)", {"one": Store([1])}),
    "an attribute": ("one.best = 4", {"one": Store()}),
    "a dict of an object in a list": ("one[0].values['x'] = 1", {"one": [Store()]}),
    "an object in an object": ("one.best.rows.append(1)", {"one": Store(best=Store())}),
    "a namespace that was empty": ("one.x = [1]; one.x.append(2)", {"one": SimpleNamespace()}),
    "an attribute is deleted": ("del one.x", {"one": SimpleNamespace(x=1, y=2)}),
    "a list of a frozen dataclass": ("one.rows.append(2)", {"one": Frozen([1])}),
    "slots": ("one.rows.append(2); one.raise_own()", {"one": Slots()}),
    "a property": ("one.value = 5; one.value += 1", {"one": Guarded()}),
    "a list of an object is replaced, and the old one grows": (
        "old = one.rows; one.rows = [9]; old.append(1); two.append(old)",
        {"one": Store([0]), "two": []},
    ),
    "a counter": ("one['a'] += 2; one['b'] += 1", {"one": Counter(a=1)}),
    "a dict with defaults": ("one['a'].append(1); one['b'].append(2)", {"one": defaultdict(list)}),
    "an ordered dict": ("one['b'] = 2; del one['a']", {"one": OrderedDict(a=1)}),
    "the order of a dict": ("one['a'] = one.pop('a')", {"one": {"a": 1, "b": 2}}),
    "another key that is equal": ("del one[1]; one[True] = 2", {"one": {1: 2}}),
    "another element that is equal": ("one.clear(); one.add(True)", {"one": {1}}),
    "an element less": ("one.discard(1); one.add(3)", {"one": {1, 2}}),
    "a list with attributes": (
        "one.label = 'x'; one.more = [1]; one.append(2)",
        {"one": labelled(1)},
    ),
    "a key that is an object": ("next(iter(one)).rows.append(1)", {"one": {Key(): 1}}),
    "a deque": ("one.appendleft(0); one[1].append(4)", {"one": deque([[1], 2], maxlen=5)}),
    "bytes": ("one.extend(b'cd'); one[0] = 65", {"one": bytearray(b"ab")}),
    "a list in a named tuple": ("one.second.append(3)", {"one": Pair(1, [2])}),
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
    shown, wanted = (repr([of[name] for name in names]) for of in (found, expected))
    assert shown == wanted or "object at" in shown, "the order too"


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


def test_an_array_is_edited_in_place():
    array = np.zeros((2, 2))
    brought_home({"one": Store(values={"x": array})}, "one.values['x'][1, 0] = 7")
    assert array.tolist() == [[0.0, 0.0], [7.0, 0.0]]


def test_the_users_own_objects_are_changed():
    inner, rows = Store(), []
    store = Store(rows, best=inner)
    brought_home({"one": store}, "one.rows.append(1); one.best.best = 2")
    assert rows == [1]
    assert store.rows is rows
    assert store.best is inner
    assert inner.best == 2


def test_objects_that_hold_each_other_end():
    one, two = Store(), Store()
    one.best, two.best = two, one
    brought_home({"one": one}, "one.best.best.rows.append(1)")
    assert one.rows == [1]


def test_the_weight_of_a_probe_is_edited_in_place():
    probe = torch.nn.Linear(2, 1, bias=False)
    weight = probe.weight
    brought_home({"probe": probe, "torch": torch}, "with torch.no_grad(): probe.weight.fill_(3)")
    assert probe.weight is weight
    assert weight.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("next(one)", iter([1, 2])),
        ("one.total += 1", Total),
        ("type(one).total += 1", Total()),
        ("one.rows.shape = (2, 1)", Store(np.zeros(2))),  # pyright: ignore[reportArgumentType]
        ("one.__class__ = type('Other', (), {})", Guarded()),
        ("for each in one: each.value = 3", {Unlike()}),
        ("for each in one: each.value = 3", frozenset([Unlike()])),
        ("one.flags.writeable = False", np.zeros(2)),
    ],
)
def test_what_cannot_be_brought_home_is_refused(block: str, value: Any):
    with pytest.raises(NotSupportedError, match="was changed by it"):
        brought_home({"one": value}, block)
    assert brought_home({"one": value}, "two = one")["one"] is value


@pytest.mark.parametrize(
    ("draw", "numbers"),
    [
        ("one.random()", random.Random(3)),
        ("float(one.normal())", np.random.default_rng(3)),
        ("float(torch.rand((), generator=one))", torch.Generator().manual_seed(3)),
    ],
)
def test_a_generator_of_random_numbers_goes_on_at_home(draw: str, numbers: Any):
    found = brought_home({"one": numbers, "torch": torch, "seen": []}, f"seen.append({draw})")
    again = eval(draw, {"one": numbers, "torch": torch})
    fresh = copy.deepcopy(found["seen"])
    brought_home({"one": numbers, "torch": torch, "seen": found["seen"]}, f"seen.append({draw})")
    assert len({*fresh, again, *found["seen"]}) == 3


def test_what_unpickling_has_made_is_refused():
    one = Made()
    with pytest.raises(NotSupportedError, match="Made from around the block"):
        brought_home({"one": one}, "one.rows.append(1)")


GRADIENTS = {
    "the first": ("(2 * one).sum().backward()", None, 2.0),
    "one more": ("(2 * one).sum().backward()", 1.0, 3.0),
    "none": ("one.grad = None", 1.0, None),
    "in place": ("one.grad.zero_()", 1.0, 0.0),
    "the same": ("two = one.grad + 1", 1.0, 1.0),
}


@pytest.mark.parametrize("how", GRADIENTS)
def test_a_gradient_comes_home(how: str):
    block, before, after = GRADIENTS[how]
    for leaf in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))):
        held = None
        if before is not None:
            held = leaf.grad = torch.full((2,), before)
        brought_home({"one": leaf}, block)
        assert (None if leaf.grad is None else leaf.grad.tolist()) == (after and [after] * 2) or (
            after == 0 and not leaf.grad.any()
        )
        assert held is None or leaf.grad is None or leaf.grad is held
        assert leaf.tolist() == [1.0, 1.0]


def test_a_gradient_of_what_was_computed_at_home_is_refused():
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(NotSupportedError, match="A gradient flowed"):
        brought_home({"one": leaf * 2}, "one.sum().backward()")
    brought_home({"one": leaf * 2}, "two = one.sum()")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_goes_on_at_home_with_the_users_parameters(kind: Any):
    def run(block: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(2))
        more = {"momentum": 0.5} if kind is torch.optim.SGD else {}
        optimizer = kind([weight], lr=0.1, **more)
        names = {"one": weight, "optimizer": optimizer}
        for _ in range(3):
            block(names, "optimizer.zero_grad(); one.pow(2).sum().backward(); optimizer.step()")
        return weight, optimizer

    here, mine = run(lambda names, lines: exec(lines, {}, names))
    home, theirs = run(brought_home)
    assert torch.equal(here, home)
    assert list(theirs.state) == [home]
    assert mine.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]


def test_what_came_from_home_goes_home_as_itself():
    inner, tensor = [1], torch.zeros(2)
    names = {"one": [], "two": {"inner": inner, "tensor": tensor}, "three": Store()}
    brought_home(
        names,
        "one.append(two['inner']); one.append((two['tensor'], three)); three.best = one; "
        "three.values[two['tensor']] = two; two['tensor'][1] = 4; two['inner'].append(5)",
    )
    assert names["one"][0] is inner
    assert names["one"][1][0] is tensor
    assert names["one"][1][1] is names["three"]
    assert names["three"].best is names["one"]
    assert names["three"].values[tensor] is names["two"]
    assert (inner, tensor.tolist()) == ([1, 5], [0.0, 4.0])


def test_what_is_one_object_on_the_rank_is_one_at_home():
    names: Any = {"one": [], "two": Store()}
    brought_home(names, "x = [1]; one += [x, (x, x)]; two.best = x; two.rows.append(one)")
    x = names["one"][0]
    assert names["one"][1][0] is names["one"][1][1] is names["two"].best is x
    assert names["two"].rows[0] is names["one"]


def test_the_memory_behind_a_view_of_it_is_changed():
    memory = bytearray(4)
    brought_home({"one": memoryview(memory)[1:]}, "one[0] = 7")
    assert memory == b"\0\7\0\0"


def test_an_array_and_a_tensor_of_one_memory_are_edited_as_one():
    array = np.zeros(4)
    names = {"one": array, "two": Store(torch.from_numpy(array)[1:])}  # pyright: ignore[reportArgumentType]
    brought_home(names, "one[1] = 5; two.rows[1] = one[1] + two.rows[0]")
    assert array.tolist() == [0.0, 5.0, 10.0, 0.0]


def test_what_is_saved_shows_the_users_own_memory():
    tensor, array = torch.zeros(4), np.zeros(4)
    fields = np.zeros(2, dtype=[("x", "<i4"), ("y", "<f8")])
    names = {"one": tensor, "two": array, "three": fields, "torch": torch, "Store": Store}
    block = (
        "a = one[1:]; b = one.view(2, 2).T; c = two[::-1]; d = torch.from_numpy(two); "
        "e = one.numpy(); f = one.view(torch.uint8); g = three['y']; h = Store([one[2:]]); "
        "i = three[1:]; a[0] = 3"
    )
    found = brought_home(names, block, "a b c d e f g h i")
    assert tensor.tolist() == [0.0, 3.0, 0.0, 0.0]
    tensor[2], array[0], fields[1] = 5, 7, (1, 2.0)
    assert (found["a"].tolist(), found["b"].tolist()) == ([3.0, 5.0, 0.0], [[0.0, 5.0], [3.0, 0.0]])
    assert (found["c"][-1], found["d"][0], found["e"][2], found["g"][1]) == (7, 7, 5, 2.0)
    assert found["f"][8:12].view(torch.float32).item() == 5
    assert (found["h"].rows[0][0], found["i"][0].tolist()) == (5, (1, 2.0))


def test_what_shows_no_memory_of_home_is_a_copy():
    tensor = torch.zeros(4)
    found = brought_home(
        {"one": tensor}, "a = one[1:].clone(); b = one[1:] + 0; c = one[:0]", "a b c"
    )
    tensor[2] = 5
    assert [found[name].tolist() for name in "abc"] == [[0.0] * 3, [0.0] * 3, []]


def test_what_is_pickled_as_it_is_holds_what_is_at_home_and_what_is_saved_beside_it():
    outer, store, tensor = [1], Store(), torch.zeros(2)
    names = {"outer": outer, "store": store, "tensor": tensor, "Key": Key, "deque": deque}
    block = (
        "log = [5]; f = lambda: (log, outer); g = log.append; h = store.rows.append; "
        "s = {tensor}; d = deque([log, outer]); k = Key(); k.rows = log; "
        "v = {'log': log}.values(); e = ValueError(outer); e.__cause__ = KeyError(3)"
    )
    found = brought_home(names, block, "log f g h s d k v e")
    log = found["log"]
    assert found["f"]()[0] is found["d"][0] is found["k"].rows is next(iter(found["v"])) is log
    assert found["f"]()[1] is found["d"][1] is found["e"].args[0] is outer
    found["g"](6)
    found["h"](7)
    assert (log, store.rows, tensor in found["s"]) == ([5, 6], [7], True)
    assert repr(found["e"].__cause__) == "KeyError(3)"


def test_a_factory_of_defaults_is_the_users_own():
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return made

    names = {"one": defaultdict(make), "defaultdict": defaultdict}
    found = brought_home(names, "two = defaultdict(one.default_factory); one['a']", "two")
    assert (made, found["two"].default_factory) == ([1], make)
    assert found["one"]["a"] is made


def test_what_a_tensor_has_beside_its_elements():
    tensor = torch.zeros(2)
    brought_home({"one": tensor}, "one.label = [1]; one.requires_grad_()")
    assert (tensor.label, tensor.requires_grad) == ([1], True)  # pyright: ignore[reportAttributeAccessIssue]


def noting(value: int, seen: list[int] = [], *, more: dict[int, int] = {}) -> None:  # noqa: B006
    seen.append(value)
    more[value] = len(seen)


def test_what_a_function_keeps_in_its_defaults_and_attributes():
    brought_home({"noting": noting}, "noting(3); noting.calls = [noting]; noting(4)")
    assert noting.__defaults__ == ([3, 4],)
    assert noting.__kwdefaults__ == {"more": {3: 1, 4: 2}}
    assert vars(noting)["calls"][0] is noting


def test_what_methods_of_containers_change():
    rows: list[int] = []
    table: dict[str, int] = {}
    put = functools.partial(table.__setitem__, "b")
    brought_home({"one": rows.append, "two": table.update, "put": put}, "one(3); two(a=1); put(4)")
    assert (rows, table) == ([3], {"a": 1, "b": 4})


def test_the_state_of_numpys_older_generator_goes_on_at_home():
    numbers = np.random.RandomState(3)
    found = brought_home({"draw": numbers.rand, "seen": []}, "seen.append(draw())")["seen"]
    again = np.random.RandomState(3)
    assert (found[0], numbers.rand()) == (again.rand(), again.rand())


def test_a_module_of_the_user_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nnsight_pp_settings.py").write_text(
        "ALPHA, ROWS = 1, []\ndef alpha(): return ALPHA"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("nnsight_pp_settings")
    monkeypatch.delitem(sys.modules, "nnsight_pp_settings")
    monkeypatch.setitem(sys.modules, "nnsight_pp_settings", module)
    rows, module.ALPHA = module.ROWS, 5
    block = "module.ROWS.append((module.ALPHA, module.alpha())); module.ALPHA += 1; module.new = 2"
    brought_home({"module": module}, block)
    assert module.ROWS is rows
    assert (rows, module.ALPHA, module.new) == ([(5, 5)], 6, 2)


def counter() -> Any:
    number = 0

    def step() -> int:
        nonlocal number
        number += 1
        return number

    return step


SEEN: list[int] = []
NUM_SEEN = 0


def look(value: int) -> None:
    global NUM_SEEN
    NUM_SEEN += 1
    SEEN.append(value)


@pytest.mark.parametrize(
    ("names", "block"),
    [
        ({"look": look}, "look(3)"),
        ({"looks": [look]}, "looks[0](3)"),
    ],
)
def test_what_a_function_of_the_user_changes_around_itself(names: Any, block: str):
    before, number = [*SEEN], NUM_SEEN
    brought_home(names, block)
    assert [*before, 3] == SEEN
    assert number + 1 == NUM_SEEN


def test_what_a_closure_counts_goes_on_at_home():
    step = counter()
    brought_home({"step": step}, "step(); step()")
    assert step() == 3


RAW = {
    ".data": "one.data[1] = 5",
    ".numpy()": "one.numpy()[1] = 5",
    ".detach()": "one.detach()[1] = 5",
    "numpy": "np.asarray(one)[1] = 5",
    "a view of it": "one.data.view(3, 1).T[0, 1] = 5",
    "another one's data": "one.data = torch.tensor([0.0, 5.0, 0.0])",
    "set_": "one.set_(torch.tensor([0.0, 5.0, 0.0]))",
    "no_grad": "with torch.no_grad(): one.copy_(torch.tensor([0.0, 5.0, 0.0]))",
}


@pytest.mark.parametrize("how", RAW)
def test_a_tensor_is_edited_past_its_version(how: str):
    tensor = torch.zeros(3)
    brought_home({"one": tensor, "torch": torch, "np": np}, RAW[how])
    assert tensor.tolist() == [0.0, 5.0, 0.0]


@pytest.mark.parametrize("put", ["one.data = other", "one.set_(other)"])
def test_a_tensor_that_was_given_other_memory_shows_it_at_home(put: str):
    one, two = torch.zeros(3), torch.zeros(6)
    head, names = one[:1], {"one": one, "two": two, "torch": torch}
    block = f"tail = one[1:]; other = torch.ones(3); {put}; one[0] = 2; tail[0] = 4"
    found = brought_home(names, block, "tail other one")
    found["other"][1] = 5
    assert found["one"] is one
    assert (one.tolist(), head.tolist(), found["tail"].tolist()) == ([2, 5, 1], [0], [4, 0])
    brought_home(names, f"other = two[::2]; {put}")
    two[2] = 7
    assert one.tolist() == [0, 7, 0]


def test_a_column_and_a_small_float_are_edited_past_their_version():
    column, small = torch.zeros(3, 2)[:, 1], torch.zeros(3, dtype=torch.bfloat16)
    brought_home({"one": column, "two": small}, "one.data[1] = 5; two.data[1] = 5")
    assert column.tolist() == small.tolist() == [0.0, 5.0, 0.0]


@pytest.mark.parametrize("edit", ["one.data = one.data.half()", "one.resize_(2)"])
def test_a_tensor_of_another_shape_or_dtype_is_refused(edit: str):
    with pytest.raises(NotSupportedError, match="was changed by it"):
        brought_home({"one": torch.zeros(3)}, edit)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 2), order="F"),
        np.zeros(3, dtype="datetime64[s]"),
        np.zeros(3, dtype=[("x", "f4"), ("y", "S0")]),
        np.ma.masked_array(np.zeros(3)),
        np.array([None, {1}, 2]),
        np.zeros((0, 3)),
        np.array(3.0),
    ],
    ids=str,
)
def test_an_array_of_any_kind_that_has_not_changed(array: Any):
    states = states_of({"one": array}, set())
    assert [change_of(before) for before in states.values()] == [[]]


class Made:
    """Has a list only where it was unpickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"is_made": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rows: list[int] = []
