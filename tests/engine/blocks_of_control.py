"""Blocks about control: functions, branches, loops, errors and random numbers in a block."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.backends import LONGER, PROMPT
from engine.blocks import direction

BLOCKS: dict[str, Callable[[Any], dict[str, Any]]] = {}


def block(function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    BLOCKS[function.__name__] = function
    return function


@block
def nested_functions_with_names_of_their_own(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):

        def counted(value: Any, factor: float = 2.0) -> Any:
            def inner() -> Any:
                return value.norm() * factor

            return inner()

        def make_adder() -> Any:
            seen = []

            total = 0.0

            def add(value: Any) -> Any:
                nonlocal total
                total += float(value[0, 0])
                seen.append(total)
                return value + total

            return add

        add = make_adder()
        early, late = add(ops.mlp(layers[3])), add(ops.mlp(layers[22]))
        sizes = [counted(early), counted(late, factor=0.5)].save()
        power = (lambda value, n=3: value**n)(late[0]).save()
        logits = ops.logits(model).save()
    return {"sizes": sizes, "power": power, "logits": logits}


@block
def generators_and_comprehensions(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):

        def norms(chosen: Any) -> Any:
            for index in chosen:
                yield index, ops.mlp(layers[index]).norm()

        found = dict(norms((1, 12, 24))).save()
        largest = max(float(value) for value in found.values()).save()
        nested = [[row[column] for column in (0, 1)] for row in ops.mlp(layers[27])[:3]].save()
        total = sum(value for value in found.values()).save()
        ordered = sorted(found, key=lambda index: float(found[index])).save()
    return {
        "found": found, "largest": largest, "nested": nested, "total": total, "ordered": ordered,
    }  # fmt: skip


@block
def a_class_made_in_the_block(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):

        class Running:
            def __init__(self) -> None:
                self.total: Any = 0
                self.count = 0

            def add(self, value: Any) -> None:
                self.total = self.total + value.sum(0)
                self.count += 1

        running = Running()
        for index in (0, 10, 20, 29):
            running.add(ops.mlp(layers[index]))
        mean = (running.total / running.count).save()
    return {"mean": mean}


@block
def odd_statements(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        import itertools as tools

        if (early := ops.mlp(layers[4])).shape[0] > 3:
            length = len(early)
        late = ops.mlp(layers[24])
        match tuple(late.shape):
            case (10, width):
                matched = width
            case _:
                matched = -1
        assert matched > 0, "a condition of the block"
        first, second = (late, early) if length > 5 else (early, late)
        pairs = list(tools.pairwise([float(row[0]) for row in first]))
        kept = [*pairs[:2], *(second[0, :2],)].save()
        text = f"{length}/{matched}/{'yes' if pairs != [] else 'no'}".save()
        del second
        with torch.no_grad():
            inside = (first * 2).save()
    return {"kept": kept, "text": text, "inside": inside}


@block
def patterns_and_identity(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    found: dict[str, Any] = {}
    with b.trace(PROMPT):
        found = {}.save()
        for index in (2, 27):
            inputs = layers[index].mlp.inputs
            match inputs:
                case ([hidden, *rest], _):
                    hidden[..., :2] = hidden[..., :2] * 3
                    rows = hidden.reshape(-1, hidden.shape[-1])
                    seen = ["a sequence", len(rest), rows[:, :4].clone()]
                case _:
                    seen = ["something else"]
            match ops.mlp(layers[index]):
                case [first, *_]:
                    seen.append(first)
                case torch.Tensor() as whole:
                    seen.append(whole[..., -1, :3])
            same = [inputs[0] is inputs[0], inputs[0][0] is inputs[0][0], inputs is None]
            same += [hidden[0] is hidden[0], inputs[0] is not None, hidden is rest]
            found[index] = [seen, same]
    return found


@block
def errors_handled_in_the_block(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        seen = [].save()
        for index in (3, 25):
            value = ops.mlp(layers[index])
            try:
                row = value[99]
                seen.append("not reached")
            except IndexError:
                row = value[-1]
            finally:
                seen.append("finally")
            try:
                value @ torch.ones(5, 5)
            except RuntimeError as error:
                seen.append(type(error).__name__)
            else:
                seen.append("not reached")
            value[0] += row
        logits = ops.logits(model).save()
    return {"seen": seen, "logits": logits}


def raised_by(run: Any) -> dict[str, Any]:
    """Return the class and text of what ``run`` raises."""
    try:
        run()
    except Exception as error:
        return {"class": type(error).__name__, "text": str(error).splitlines()[0]}
    return {"class": "none"}


@block
def an_error_after_a_value_of_every_stage(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops

    def run() -> None:
        with b.trace(PROMPT):
            early, late = ops.mlp(layers[2]), ops.mlp(layers[26])
            size = early.shape[0] + late.shape[0]
            raise ValueError(f"seen {size} rows")

    return raised_by(run)


@block
def a_condition_on_a_late_value_fails(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops

    def run() -> None:
        with b.trace(PROMPT, steps=3) as tracer:
            for step in tracer.iter[:3]:
                late = ops.mlp(layers[28])
                assert late.shape[0] > 1, f"one row in step {step}"

    return raised_by(run)


@block
def the_order_of_the_model_is_the_order_of_a_block(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops

    def run(first: int, second: int) -> None:
        with b.trace(PROMPT):
            late = ops.mlp(layers[first]).save()
            early = ops.mlp(layers[second]).save()

    pairs = [(20, 3), (25, 22), (5, 2), (14, 14)]
    return {str(pair): raised_by(lambda pair=pair: run(*pair))["class"] for pair in pairs}


@block
def a_loop_with_break_and_continue(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=5) as tracer:
        seen = [].save()
        for step in tracer.iter[:5]:
            if step == 1:
                continue
            late = ops.mlp(layers[26])
            seen.append((step, late[-1]))
            if step == 3:
                break
        else:
            seen.append("not reached")
        after = len(seen).save()
    return {"seen": seen, "after": after}


@block
def an_open_loop_that_is_left(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=4) as tracer:
        seen = [].save()
        for step in tracer.all():
            seen.append(ops.mlp(layers[24])[-1])
            if step == 2:
                break
        after = "reached".save()
    return {"seen": seen, "after": after}


@block
def chosen_steps(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=4) as tracer:
        seen = [].save()
        for step in tracer.iter[[0, 2]]:
            seen.append((step, ops.mlp(layers[5])[-1], ops.mlp(layers[25])[-1]))
        for step in tracer.iter[3:5:2]:
            seen.append((step, ops.mlp(layers[25])[-1]))
    return {"seen": seen}


@block
def loops_over_layers_within_steps(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=3) as tracer:
        table = {}.save()
        for step in tracer.iter[:3]:
            for index in range(0, 30, 7):
                value = ops.mlp(layers[index])
                value[-1] *= 1.1
                table[f"{step}/{index}"] = value[-1]
            table[f"{step}/logits"] = ops.logits(model)
    return {"table": table}


@block
def every_layer_steered_at_every_step(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    vector = direction()
    with b.trace(LONGER, steps=3) as tracer:
        logits = [].save()
        for _ in tracer.iter[:3]:
            for layer in layers:
                ops.add(layer, 0.1 * vector)
            logits.append(ops.logits(model))
    return {"logits": logits}


@block
def a_while_loop_on_another_stages_value(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.mlp(layers[4])
        late = ops.mlp(layers[23])
        limit = float(early.norm())
        rounds = 0
        while float(late.norm()) > 0.25 * limit and rounds < 8:
            late *= 0.5
            rounds += 1
        counted = rounds.save()
        logits = ops.logits(model).save()
    return {"counted": counted, "logits": logits}


@block
def a_branch_in_every_step_on_a_value_of_the_last(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=4) as tracer:
        taken = [].save()
        size = 0.0
        for _ in tracer.iter[:4]:
            if size > 1.0:
                ops.mlp(layers[6])[:] *= 0.5
                taken.append("halved")
            size = float(ops.mlp(layers[27])[-1].norm())
            taken.append(size)
            taken.append(ops.logits(model)[0, :5])
    return {"taken": taken}


@block
def drawn_numbers_are_alike_where_they_are_used(b: Any) -> dict[str, Any]:
    """Two backends draw other numbers: what is compared is that one trace agrees with itself."""
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT, steps=2) as tracer:
        gaps = [].save()
        for _ in tracer.iter[:2]:
            for index in (3, 25):
                noise = torch.randn(576)
                factor = random.random() + float(np.random.rand())
                value = ops.mlp(layers[index])
                before = value.clone()
                value[:] += factor * noise
                gap = (value - before - factor * noise).abs().max()
                gaps.append(bool(gap < 1e-3) and bool(noise.std() > 0.5) and 0 < factor < 2)
    return {"gaps": gaps}


@block
def noise_on_one_stage_is_taken_off_on_another(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        noise = torch.rand(10, 576)
        early = ops.mlp(layers[5])
        kept = (early + noise) - early
        late = ops.mlp(layers[24])
        late[:] += noise
        late[:] -= kept
        logits = ops.logits(model).save()
    return {"logits": logits}


@block
def outer_containers_of_every_kind(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    rows: list[Any] = [None, None]
    table: dict[str, Any] = {"old": 1, "gone": 2}
    kinds: set[str] = {"before"}
    with b.trace(PROMPT):
        rows[0] = ops.mlp(layers[3])[-1]
        rows[1] = ops.mlp(layers[23])[-1]
        rows.append("more")
        table["new"] = rows[1] + rows[0]
        del table["gone"]
        kinds.add(str(rows[0].dtype))
    return {"rows": rows, "table": table, "kinds": sorted(kinds)}


@dataclass
class Store:
    """Keeps what a block finds."""

    rows: list[Any] = field(default_factory=list)
    best: Any = None

    def take(self, row: Any) -> None:
        self.rows.append(row)
        self.best = row if self.best is None else self.best + row


@block
def objects_around_a_block_keep_what_it_gives_them(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    store, space = Store(), SimpleNamespace(table={}, inner=Store(["old"]))
    rows, inner = store.rows, space.inner
    counts, numbers = Counter(seen=1), random.Random(3)
    with b.trace(PROMPT):
        store.take(ops.mlp(layers[3])[-1])
        store.take(ops.mlp(layers[23])[-1])
        space.table["norm"] = store.best.norm()
        space.inner.rows.append(float(store.rows[0][0]))
        space.late = store.rows[1] * 2
        counts["seen"] += 2
        drawn = [numbers.random()].save()
    assert store.rows is rows
    assert space.inner is inner
    return {"store": vars(store), "table": space.table, "rows": inner.rows, "late": space.late,
            "counts": dict(counts), "numbers": [*drawn, numbers.random()]}  # fmt: skip


@block
def a_function_of_the_file_takes_values(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[4]), ops.mlp(layers[22])
        found = mixed(early, late).save()
        late[:] = mixed(late, early)
        after = ops.stream(layers[24]).save()
    return {"found": found, "after": after}


def mixed(one: torch.Tensor, other: torch.Tensor, share: float = 0.3) -> torch.Tensor:
    return share * one + (1 - share) * other


@block
def a_lens_in_every_step(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=3) as tracer:
        best = [].save()
        for _ in tracer.iter[:3]:
            lens = [ops.lens(model, ops.stream(layers[index])[-1:]) for index in (8, 18, 28)]
            best.append([int(one.argmax()) for one in lens])
            best.append(ops.logits(model))
    return {"best": best}


@block
def a_prompt_of_one_step_and_no_loop(b: Any) -> dict[str, Any]:
    ops, model = b.ops, b.model
    with b.trace("Hello", steps=1):
        logits = ops.logits(model).save()
        best = int(logits.argmax()).save()
    return {"logits": logits, "best": best}


def of_kind(value: Any) -> Any:
    return value[0] if type(value) is torch.Tensor else 100.0


@block
def questions_that_python_and_torch_ask_of_a_value(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        factor, found = 1.0, []
        for index in (3, 24):
            given = layers[index].mlp.inputs[0]
            try:
                given[0] += 0.5
                factor *= 3
            except TypeError:
                factor *= 0.5
            found.append(ops.mlp(layers[index]))
        early, late = found
        names = [type(early).__name__, type(late) is torch.Tensor].save()
        numbers = torch.tensor([early.norm(), late.sum(), 1.5]).save()
        norms = (torch.norm(early, dim=-1) + torch.norm(late, dim=-1)).save()
        copied = copy.deepcopy([early, early[-1], late, late[0]])
        copied[1] *= 0
        copied[3] *= 2
        late[:] = factor * (copied[0] + copied[2]) + of_kind(early) + of_kind(late)
        logits = ops.logits(model).save()
    return {"names": names, "numbers": numbers, "norms": norms, "logits": logits}
