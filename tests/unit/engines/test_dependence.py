"""Which invokes of a trace depend on each other."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import torch

from nnsight_pp.core.block import Block, Scope
from nnsight_pp.core.saved import SavedSet
from nnsight_pp.engines.vllm.dependence import companies_of
from nnsight_pp.engines.vllm.message import message_of
from nnsight_pp.trace.names import Names, SiblingNames
from nnsight_pp.trace.tracer import Invocation, Tracer


class Collected:
    """A trace whose invokes are not run: `companies` says who depends on whom."""

    def __init__(self) -> None:
        self.companies: list[list[int]] = []

    def trace(self) -> Any:
        def run(_: Tracer, invocations: Any) -> None:
            self.companies = companies_of(invocations)

        return Tracer(run, (), {}, has_input=False)

    def of(self, line: str, names: dict[str, Any]) -> list[list[int]]:
        """Return who depends on whom of two invokes with that line."""
        block = Block("user.py", 3, f"    {line}\n", "run")
        return companies_of(
            [Invocation((), {}, block, Names((names,)), SavedSet()) for _ in range(2)]
        )


def test_a_name_of_an_earlier_invoke() -> None:
    found = Collected()
    with found.trace() as tracer:
        with tracer.invoke("a"):
            h = object()
        with tracer.invoke("b"):
            again = h
        with tracer.invoke("c"):
            k = object()
    assert found.companies == [[0, 1]]


def test_a_name_that_the_body_of_the_trace_binds_is_not_what_an_earlier_invoke_bound() -> None:
    found = Collected()
    with found.trace() as tracer:
        with tracer.invoke("a"):
            for index in range(2):
                kept = index
        for index in range(2):
            with tracer.invoke("b"):
                print(index)
        with tracer.invoke("c"):
            print(index)
        with tracer.invoke("d"):
            index = 5
        with tracer.invoke("e"):
            print(index)
    assert found.companies == [[4, 5]]


def test_what_the_body_binds_is_told_by_the_places_of_those_who_share_names() -> None:
    told: list[Any] = []

    def run(_: Tracer, invocations: Any) -> None:
        for members in companies_of(invocations):
            beside = [invocations[number] for number in members]
            told.extend(message_of("t", one, "", beside) for one in beside)

    with Tracer(run, (), {}, has_input=False) as tracer:
        with tracer.invoke("alone"):
            pass
        scale = 1
        with tracer.invoke("a"):
            kept = [scale]
            scale = 2
        with tracer.invoke("alone too"):
            pass
        scale = 3
        with tracer.invoke("b"):
            kept.append(scale)
    first, second = told
    assert first.around["scale"] == 0
    assert second.around["scale"] == 1
    assert second.names["scale"] == 3
    blocks = [
        SimpleNamespace(block=one.block, scope=Scope(), frame=0, is_over=False) for one in told
    ]
    blocks[0].scope.update(kept=[], scale=2)
    seen = Scope(SiblingNames(blocks, 1, 0, around=second.around), second.names)
    assert (seen["scale"], seen["kept"]) == (3, [])
    assert Scope(SiblingNames(blocks, 1, 0), second.names)["scale"] == 2


def test_a_name_of_a_later_invoke() -> None:
    found = Collected()
    with found.trace() as tracer:
        with tracer.invoke("a"):
            again = later  # noqa: F821 - the other invoke binds it
        with tracer.invoke("b"):
            later = object()
    assert found.companies == [[0, 1]]


def test_the_same_names_in_each_are_each_ones_own() -> None:
    found = Collected()
    with found.trace() as tracer:
        rows: list[Any] = []
        for prompt in "abc":
            with tracer.invoke(prompt):
                for step in range(3):
                    h = object()
                    rows.append((step, h))
                last = h
                again = last
    assert found.companies == []


def test_a_dictionary_that_one_fills_and_another_looks_into() -> None:
    found = Collected()
    with found.trace() as tracer:
        shared: dict[str, Any] = {}
        other = shared
        with tracer.invoke("a"):
            shared["a"] = 1
        with tracer.invoke("b"):
            shared["b"] = 2
        with tracer.invoke("c"):
            again = other["a"]
    assert found.companies == [[0, 1, 2]]


def test_what_nobody_changes_may_be_looked_at_by_all() -> None:
    found = Collected()
    vector, names = torch.ones(3), ["a", "b"]
    with found.trace() as tracer:
        for prompt in names:
            with tracer.invoke(prompt):
                h = vector * len(names)
                again = torch.stack([h, vector])
    assert found.companies == []


def test_a_container_that_is_handed_to_a_function() -> None:
    found = Collected()
    kept: list[Any] = []

    def keep(rows: list[Any]) -> None:
        rows.append(1)

    with found.trace() as tracer:
        for prompt in "ab":
            with tracer.invoke(prompt):
                keep(kept)
    assert found.companies == [[0, 1]]


def test_one_barrier_and_two_companies() -> None:
    found = Collected()
    with found.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("a"):
            barrier()
        with tracer.invoke("b"):
            x = object()
        with tracer.invoke("c"):
            pass
        with tracer.invoke("d"):
            barrier()
        with tracer.invoke("e"):
            y = x
    assert found.companies == [[0, 3], [1, 4]]


def test_a_user_object_that_holds_a_value() -> None:
    class Holder:
        value: Any = None

    found, holder = Collected(), Holder()
    with found.trace() as tracer:
        with tracer.invoke("a"):
            holder.value = 1
        with tracer.invoke("b"):
            again = holder.value
    assert found.companies == [[0, 1]]


class Noting:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def note(self, value: Any) -> None:
        self.rows.append(value)

    def shape(self) -> int:
        return len(self.rows)


def test_two_that_change_what_cannot_be_put_together() -> None:
    found = Collected()
    tensor, waiting, numbers = torch.zeros(2), deque([1]), torch.Generator()
    for shared, change in (
        (tensor, "x[0] = 1"),
        (waiting, "x.append(1)"),
        (waiting, "x.appendleft(1)"),
        (waiting, "x.extendleft([1])"),
        (waiting, "y = x.popleft()"),
        (waiting, "x.rotate()"),
        ({1}, "x.difference_update({1})"),
        (numbers, "torch.rand(1, generator=x)"),
        (Counter(), "x.update('a')"),
    ):
        companies = found.of(change, {"x": shared, "torch": torch})
        assert companies == [[0, 1]], change
    for shared, add in (([], "x.append(1)"), (set(), "x.add(1)"), ({}, "x['a'] = 1")):
        assert found.of(add, {"x": shared}) == [], add


def test_what_leads_to_one_object() -> None:
    found = Collected()
    board: dict[str, list[Any]] = {"rows": []}
    rows, tensor, keeper = board["rows"], torch.zeros(3), Noting()
    part, array = tensor[1:], tensor.numpy()
    with found.trace() as tracer:
        with tracer.invoke("a"):
            board["rows"].append(1)
        with tracer.invoke("b"):
            n = len(rows)
        with tracer.invoke("c"):
            part[0] = 1
        with tracer.invoke("d"):
            m = float(array[1])
        with tracer.invoke("e"):
            keeper.note(1)
        with tracer.invoke("f"):
            k = keeper.shape()
    assert found.companies == [[0, 1], [2, 3], [4, 5]]


def test_functions_that_change_something_around_themselves() -> None:
    found, state, rows = Collected(), {"n": 0}, []
    number = 0

    def up() -> int:
        state["n"] += 1
        return state["n"]

    def count() -> int:
        nonlocal number
        number += 1
        return number

    def note(value: Any) -> None:
        rows.append(value)

    with found.trace() as tracer:
        with tracer.invoke("a"):
            x = up()
        with tracer.invoke("b"):
            x = up()
        with tracer.invoke("c"):
            x = count()
        with tracer.invoke("d"):
            x = count()
        with tracer.invoke("e"):
            note(1)
        with tracer.invoke("f"):
            note(2)
    assert found.companies == [[0, 1], [2, 3]]


class _Adder:
    """A user's own object whose `add` changes nothing of it, and whose `note` does."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, part: Any, value: Any) -> None:
        part.output[:] += value

    def note(self, value: Any) -> None:
        self.total += value


def _mlp(part: Any) -> Any:
    return part.output


def test_helpers_that_change_only_what_they_are_given_leave_invokes_apart() -> None:
    found = Collected()
    ops = SimpleNamespace(add=_Adder.add, mlp=_mlp)
    layers = [torch.nn.Identity()]
    names = {"ops": ops, "own": _Adder(), "mlp": _mlp, "layer": 3, "v": torch.ones(2)}
    for line in (
        "ops.add(None, layer, v)",
        "ops.mlp(layer)[-1] += v",
        "own.add(layer, v)",
        "mlp(layer)[-1] += v",
        "mlp(layer).mul_(2)",
    ):
        assert found.of(line, names) == [], line
    for line in ("own.note(1)", "v.add_(1)", "own.total += 1", "ops.add = 3", "row.add(layer)"):
        assert found.of(line, names | {"row": deque(layers)}) == [[0, 1]], line
