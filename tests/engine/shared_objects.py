"""Blocks in which an object stands in several places: afterwards it is one, as in one process.

They are odd blocks too (`engine.odd_blocks`): one stage and two give the same. What a local model
does is written down in their asserts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import nnsight_pp
from engine.odd_blocks import PROMPT, odd

if TYPE_CHECKING:
    from nnsight_pp import VLLM

OPTIONS: Any = {"temperature": 0.0, "max_tokens": 1}


class Store:
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.total = 0

    def note(self, value: Any) -> None:
        self.rows.append(value)
        self.total += 1


@odd
def views_of_what_is_at_home(model: VLLM, layers: list[Any]) -> Any:
    outer, array, rows = torch.zeros(4), np.zeros(4), []
    with model.trace(PROMPT, **OPTIONS):
        late = layers[3].mlp.output
        tail = outer[1:].save()
        square = nnsight_pp.save(outer.view(2, 2))
        rows.append(outer[2:])
        outer[0] = late[-1, 0]
        tail[1] = 7
        back = nnsight_pp.save(array[::-1])
        shown = nnsight_pp.save(torch.from_numpy(array))
        held = nnsight_pp.save(Store())
        held.rows.append(outer[:1])
        array[1] = float(late[-1, 1])
    first = outer.clone()
    outer[2], array[3] = 5, 9
    assert (tail[1], square[1, 0], rows[0][0], back[0], shown[3]) == (5, 5, 5, 9, 9)
    assert held.rows[0].data_ptr() == outer.data_ptr()
    assert first[2] == 7
    return first, shown


@odd
def what_a_saved_function_closes_over(model: VLLM, layers: list[Any]) -> Any:
    outer, store = [1], Store()
    with model.trace(PROMPT, **OPTIONS):
        late = layers[3].mlp.output[-1].clone()
        log = [len(late)].save()

        def last(own: list[Any] = outer) -> Any:
            return log[-1], outer[-1], own[-1]

        nnsight_pp.save(last)
        add = nnsight_pp.save(log.append)
        note = nnsight_pp.save(store.note)
        put = nnsight_pp.save(functools.partial(outer.append, 3))
        values = nnsight_pp.save({"log": log}.values())
        held = nnsight_pp.save(Store())
        held.rows = log
        store.note(late)
    add("more")
    put()
    note(2)
    assert last() == ("more", 3, 3)
    assert held.rows is log is next(iter(values))
    assert (note.__self__ is store, store.total, len(store.rows)) == (True, 2, 2)
    return log, outer, store.rows[0]


def count(state: dict[str, int]) -> int:
    state["n"] = state["n"] + 1
    return state["n"]


@odd
def invokes_that_share_by_way_of_something(model: VLLM, layers: list[Any]) -> Any:
    tensor, store, state = torch.zeros(3), Store(), {"n": 0}
    board: dict[str, list[Any]] = {"rows": []}
    rows, part = board["rows"], tensor[1:]
    numbers = torch.Generator().manual_seed(1)

    def up() -> int:
        return count(state)

    with model.trace(**OPTIONS) as tracer:
        with tracer.invoke(PROMPT):
            early = layers[0].mlp.output[-1, 0]
            tensor[0] = early
            tensor[1] = 4
            board["rows"].append(1)
            store.note(1)
            first = (up(), torch.rand(1, generator=numbers)).save()
        with tracer.invoke(PROMPT):
            late = layers[3].mlp.output[-1, 0]
            tensor[2] = late
            seen = (len(rows), float(part[0])).save()
            store.note(2)
            second = (up(), torch.rand(1, generator=numbers)).save()
    assert (seen, store.rows, store.total, state["n"]) == ((1, 4.0), [1, 2], 2, 2)
    assert (first[0], second[0]) == (1, 2)
    assert first[1] != second[1]
    assert tensor.all()
    return tensor, first[1], second[1]


@odd
def what_is_beside_the_items(model: VLLM, layers: list[Any]) -> Any:
    tensor, items = torch.zeros(2), {"a": 1, "b": 2}
    with model.trace(PROMPT, **OPTIONS):
        items["a"] = items.pop("a") + len(layers[3].mlp.output)
        tensor.label = "late"
        tensor.requires_grad_()
    assert list(items) == ["b", "a"]
    assert (tensor.label, tensor.requires_grad) == ("late", True)  # pyright: ignore[reportAttributeAccessIssue]
    return items["a"]


def put_by_invokes(model: Any, trace: Any) -> tuple[list[str], dict[str, str]]:
    """Return what three invokes put into one list and one dict, three tokens long."""
    rows, firsts, layers = ["from the start"], {}, list(model.model.layers)

    def note(text: str) -> None:
        rows.append(text)

    with trace as tracer:
        with tracer.invoke(PROMPT):
            rows.append("a")
            for step in tracer.iter[:3]:
                layers[1].mlp.output
                note(f"a {step} 1")
                firsts["a"] = "1"
                layers[1].output
                layers[3].mlp.output
                rows.extend([f"a {step} 3", "a again"])
            firsts["a is over"] = "3"
        with tracer.invoke(PROMPT):
            note("b")
            for step in tracer.iter[:3]:
                layers[0].mlp.output
                rows.append(f"b {step} 0")
                firsts["b"] = "0"
                layers[3].mlp.output
                rows.append(f"b {step} 3")
            tracer.result
            rows.append("b is over")
        with tracer.invoke(PROMPT):
            for step in tracer.iter[:2]:
                layers[1].mlp.output
                rows.append(f"c {step} 1")
                firsts["c"] = "1"
                layers[2].input_layernorm(layers[2].mlp.output)
                note(f"c {step} 2")
            tracer.result
            note("c is over")
    return rows, firsts
