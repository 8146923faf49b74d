"""Blocks about values: every way in which a line may touch one, on every backend."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.backends import PROMPT

BLOCKS: dict[str, Callable[[Any], dict[str, Any]]] = {}


def block(function: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    BLOCKS[function.__name__] = function
    return function


@block
def every_kind_of_index(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        found = [].save()
        for index in (3, 16, 25):
            value = ops.mlp(layers[index])
            found.append(
                [value[0], value[-1], value[1:3], value[::2, :4], value[..., 5], value[:, -1]]
            )
            found.append([value[[0, 2]], value[None, 0], value[2][3], value[0, 1:7:3]])
            found.append(value[torch.tensor([True, False] * 5)])
            found.append(value[torch.tensor([1, 1, 3]), torch.tensor([0, 5, 7])])
    return {"found": found}


@block
def masks_of_another_stages_value(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[2]), ops.mlp(layers[26])
        big = early.abs() > early.abs().mean() * 2
        late[big] = 0
        late[:, early.argmax(-1)] = 0.5
        counted = bool((late == 0).any()).save()
        logits = ops.logits(model).save()
    return {"counted": counted, "logits": logits}


@block
def reductions_of_every_stage(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        found = {}.save()
        for name, index in {"early": 1, "middle": 15, "late": 28}.items():
            value = ops.mlp(layers[index])
            found[name] = [
                value.sum(), value.mean(0), value.norm(dim=-1), value.max(), value.amin(1),
                value.var(), value.std(0), value.abs().sum(-1), value.argmax(-1), value.numel(),
                (value > 1e9).any(), (value < 1e9).all(), value.topk(2).values,
                value.min(-1).values,
                torch.linalg.norm(value), value.prod(-1).isnan().any(),
            ]  # fmt: skip
    return found


@block
def operators_on_either_side(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    plain = torch.linspace(0.5, 1.5, 576)
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[4]), ops.mlp(layers[24])
        found = [
            early + late, plain - early, 2 * late, 1.0 / (early.abs() + 1), early @ late.T,
            plain @ late[0], -early, abs(late), early**2, 2.0 ** early[0, :3].tanh(),
            (early > late).sum() >= 0, (late[0] // 1e9), early[0] % 1e9, plain * early * late,
            early.__add__(1), torch.ones(576).mul(late[-1]),
        ].save()  # fmt: skip
    return {"found": found}


@block
def functions_of_torch(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[5]), ops.mlp(layers[21])
        found = [
            torch.softmax(early, -1), torch.nn.functional.layer_norm(late, (576,)),
            torch.einsum("th,sh->ts", early, late), torch.matmul(early, late.transpose(0, 1)),
            torch.where(late > early, late, early), torch.maximum(early, late),
            torch.cat([early, late]), torch.stack((early[0], late[0])), torch.cumsum(late, 0),
            torch.sort(late[0], descending=True).values, torch.clamp(early, -1, 1),
            torch.outer(early[0, :4], late[0, :4]), torch.nn.functional.gelu(late),
            torch.allclose(early, early.clone()), torch.is_tensor(late), torch.numel(early),
            torch.zeros_like(late), torch.full_like(early, 3)[0], torch.diag(late[:10, :10]),
        ].save()  # fmt: skip
    return {"found": found}


@block
def numbers_and_texts_of_values(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        found = {}.save()
        for name, index in {"early": 6, "late": 23}.items():
            value = ops.mlp(layers[index])
            found[name] = {
                "item": value[0, 0].item(), "float": float(value.sum()), "len": len(value),
                "shape": tuple(value.shape), "size": value.size(-1), "dim": value.dim(),
                "list": value[0, :3].tolist(), "bool": bool(value[0, 0] == value[0, 0]),
                "dtype": str(value.dtype), "device": value.device.type,
                "text": f"{value.ndim:d} dims",
                "log": math.log(float(value.norm())), "rounded": round(float(value.norm()) / 1e6),
                "is": isinstance(value, torch.Tensor), "type": type(value[0].tolist()).__name__,
                "iterated": [float(row[0]) for row in value], "int": int(value.argmax()),
            }  # fmt: skip
    return found


@block
def numpy_on_values(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[7]), ops.mlp(layers[27])
        sums = (float(np.asarray(early).sum()), float(np.abs(late.numpy()).max())).save()
        both = torch.from_numpy(np.stack([early[0].numpy(), late[0].numpy()])).save()
    return {"sums": sums, "both": both}


@block
def unpacking(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[3]), ops.mlp(layers[22])
        first, *rest, last = early
        (x, y), z = late[:2, :1], late[2, :1]
        values, ids = late[0].topk(3)
        pairs = [(a - c).norm() for a, c in zip(early, late, strict=True)].save()
        numbered = {number: row[0] for number, row in enumerate(late)}.save()
        counted = len(rest).save()
        found = [first, last, x, y, z, values, ids].save()
    return {"pairs": pairs, "numbered": numbered, "counted": counted, "found": found}


@block
def a_dataclass_and_other_containers(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        from collections import OrderedDict, deque
        from dataclasses import dataclass

        @dataclass
        class Pair:
            early: Any
            late: Any = None

        pair = Pair(ops.mlp(layers[2]))
        pair.late = ops.mlp(layers[24])
        ordered = OrderedDict(late=pair.late[0], early=pair.early[0])
        queue = deque([pair.early[1], pair.late[1]], maxlen=2)
        found = [
            pair.early + pair.late,
            list(ordered.values()),
            list(queue),
            (pair.late[2],),
        ].save()
        keys = tuple(ordered).save()
    return {"found": found, "keys": keys}


@block
def plain_objects_are_saved_exactly(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        late = ops.mlp(layers[25])
        nothing = {"none": None, "list": [None, ()]}.save()
        numbers = [0, -1, 2**70, 1.5, True, 2 + 3j, float("inf")].save()
        texts = ["", "naïve ✓", b"\x00\xff", r"\d"].save()
        sets = {
            "set": {1, 2},
            "frozen": frozenset({"a"}),
            "range": range(3),
            "slice": (1, 2),
        }.save()
        kept = (late[0, 0] if nothing["none"] is None else None).save()
    return {"nothing": nothing, "numbers": numbers, "texts": texts, "sets": sets, "kept": kept}


@block
def several_dtypes_at_once(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[3]), ops.mlp(layers[20])
        found = {
            "double": early.double(), "half": late.half(), "ids": late.argmax(-1),
            "int": early.argmax(-1).to(torch.int32), "mask": early == early,
            "byte": (late * 0).byte(), "mixed": early[0].double() + late[0],
            "complex": torch.complex(early[0, :2], late[0, :2]),
            "empty": late[:0], "zero_dim": early[0, 0].double(),
        }.save()  # fmt: skip
        changed = late.to(torch.float64).mul_(2).float().save()
    return {"found": found, "changed": changed}


@block
def a_location_is_read_again_after_it_was_assigned(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        first = ops.mlp(layers[4])
        ops.set_mlp(layers[4], first * 2)
        second = ops.mlp(layers[4])
        second[0] = 1.0
        third = ops.mlp(layers[4]).clone().save()
        late = ops.mlp(layers[23])
        ops.set_mlp(layers[23], late + second)
        again = ops.mlp(layers[23])
        ops.set_mlp(layers[23], again * 0.5)
        last = ops.mlp(layers[23]).save()
        kept = [first, late, again].save()
        logits = ops.logits(model).save()
    return {"third": third, "last": last, "kept": kept, "logits": logits}


@block
def every_edit_in_place(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        for index in (5, 18, 27):
            value = ops.mlp(layers[index])
            value += 0.1
            value -= 0.05
            value *= 1.5
            value /= 2
            value.add_(0.1).mul_(0.9)
            value[0].zero_()
            value[1, :5].fill_(0.5)
            value[2].copy_(value[3])
            value[-1] = value[0] + 1
            value[:, 7] = 0.25
            value.clamp_(-3, 3)
            value.masked_fill_(value > 2.5, 2.0)
            torch.add(value, 0.1, out=value)
            torch.neg_(value)
            value[[4, 5]] += 0.3
        late = ops.stream(layers[28]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def edits_through_views(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        for index in (2, 19):
            value = ops.mlp(layers[index])
            value.T[0] = 0.5
            value.view(-1)[:7].zero_()
            left, right = value.chunk(2, dim=-1)
            left *= 0.5
            right += 0.25
            value.unbind(0)[1].neg_()
            value.narrow(1, 10, 5).fill_(0.1)
            value.reshape(10, 2, 288)[:, 1, :3] = 0.2
            row = value[3]
            row[:4] = row[4:8]
        early = value.sum().save()
        logits = ops.logits(model).save()
    return {"early": early, "logits": logits}


@block
def copies_are_apart(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        found = [].save()
        for index in (6, 26):
            value = ops.mlp(layers[index])
            one, two, three = value.clone(), copy.deepcopy(value), value.detach().clone()
            four = torch.empty_like(value).copy_(value)
            value[:] = 0.125
            two += 1
            found.append([value, one, two, three, four])
    return {"found": found}


@block
def one_value_under_two_names(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        value = ops.mlp(layers[3])
        same = value
        table = {"it": value}
        same[0] = 0.5
        table["it"][1] = 0.75
        late = ops.mlp(layers[21])
        late[:2] = value[:2]
        found = [value[:2], same[:2], table["it"][:2], late[:2]].save()
        logits = ops.logits(model).save()
    return {"found": found, "logits": logits}


@block
def a_value_of_step_one_is_used_in_step_three(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=4) as tracer:
        kept: list[Any] = []
        logits = [].save()
        for step in tracer.iter[:4]:
            kept.append((ops.mlp(layers[4]), ops.mlp(layers[24])))
            if step >= 2:
                early, late = kept[step - 2]
                ops.mlp(layers[26])[:] += 0.1 * early[-1] + 0.1 * late[-1]
            logits.append(ops.logits(model))
        number = len(kept).save()
    return {"logits": logits, "number": number}


@block
def the_last_rows_of_all_layers(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        rows = torch.stack([ops.stream(layer)[-1] for layer in layers]).save()
        norms = torch.tensor([float(row.norm()) for row in rows]).save()
    return {"rows": rows, "norms": norms}


@block
def a_chain_through_the_stages(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        carried = ops.mlp(layers[0])[-1]
        for index in (5, 11, 17, 23, 29):
            here = ops.mlp(layers[index])
            here[-1] += 0.2 * carried
            carried = here[-1] - 0.1 * carried
        found = carried.save()
        logits = ops.logits(model).save()
    return {"found": found, "logits": logits}


@block
def attention_and_norms(b: Any) -> dict[str, Any]:
    layers, model, ops = b.layers, b.model, b.ops
    with b.trace(PROMPT):
        found = [].save()
        for index in (1, 14, 15, 29):
            found.append(layers[index].self_attn.o_proj.output[0])
            layers[index].self_attn.o_proj.output[0][-1] *= 1.5
        normed = model.model.norm.output[0].save()
        logits = ops.logits(model).save()
    return {"found": found, "normed": normed, "logits": logits}


@block
def one_row_of_an_early_layer_into_all_rows_of_a_late_one(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT):
        early = ops.mlp(layers[8])
        ops.set_mlp(layers[25], early[3].expand(10, -1).clone())
        late = ops.stream(layers[26]).save()
        logits = ops.logits(model).save()
    return {"late": late, "logits": logits}


@block
def only_one_token_is_left_in_the_logits(b: Any) -> dict[str, Any]:
    ops, model = b.ops, b.model
    with b.trace(PROMPT, steps=3) as tracer:
        seen = [].save()
        for step in tracer.iter[:3]:
            logits = ops.logits(model)
            best = int(logits.argmax())
            logits[:] = float("-inf")
            logits[0, 100 + step] = 1.0
            seen.append((best, int(logits.argmax())))
    return {"seen": seen}


@block
def saved_in_every_way(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        from nnsight_pp import save

        early = save(ops.mlp(layers[2]))
        late = ops.mlp(layers[24])
        late.save()
        again = late.save()
        early[0] = 0.5  # what is saved shows it
        grown = [].save()
        grown.extend([early[0], late[0]])
        table = {"a": 1}.save()
        table.update(b=late[-1])
        expression = (early[0] + late[0]).save()
    return {
        "early": early, "late": late, "again": again, "grown": grown, "table": table,
        "expression": expression,
    }  # fmt: skip


@block
def weights_edited_by_a_block_are_its_own(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    with b.trace(PROMPT):
        weights = [layers[index].input_layernorm.weight.clone() for index in (2, 27)]
        weights[0][:] = weights[1]
        weights[1] += 1
        late = ops.mlp(layers[28])
        found = [weights[0], weights[1], late * weights[0]].save()
    return {"found": found}


NOTED: list[float] = []
NUM_NOTED = 0


def note(value: Any) -> None:
    global NUM_NOTED
    NUM_NOTED += 1
    NOTED.append(float(value))


class Keeper:
    """Notes what it is given beside itself."""

    def keep(self, value: Any) -> None:
        note(value)


def summing() -> Any:
    total = 0.0

    def add(value: Any) -> float:
        nonlocal total
        total += float(value)
        return total

    return add


@block
def functions_and_methods_that_change_what_is_around_them(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    NOTED.clear()
    before, keeper, add = NUM_NOTED, Keeper(), summing()
    with b.trace(PROMPT, steps=2) as tracer:
        for _ in tracer.iter[:2]:
            note(ops.mlp(layers[3])[-1, 0])
            keeper.keep(ops.mlp(layers[20])[-1, 1])
            add(ops.mlp(layers[24])[-1, 2])
    return {"noted": [*NOTED], "num": NUM_NOTED - before, "total": add(0)}


@block
def writes_past_the_version_of_a_tensor_around(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    names = ("data", "numpy", "array", "detached")
    kept = {name: torch.zeros(3) for name in names}
    rows = np.zeros((2, 3))
    with b.trace(PROMPT):
        early, late = ops.mlp(layers[3])[0, :3], ops.mlp(layers[20])[0, :3]
        kept["data"].data[:] = late
        kept["numpy"].numpy()[1:] = early[1:].detach().numpy()
        np.asarray(kept["array"])[0] = float(late[0])
        kept["detached"].detach().copy_(early)
        rows[1] = late.detach().numpy()
    return {**kept, "rows": torch.from_numpy(rows)}


@block
def views_of_one_memory_around_the_block(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    whole, table = torch.zeros(4, 3), np.zeros((4, 3))
    row, column = whole[1], table[:, 2]
    with b.trace(PROMPT):
        row += ops.mlp(layers[3])[0, :3].detach()
        column[:] = ops.mlp(layers[20])[0, :4].detach().numpy()
        seen = (whole.sum(), float(table.sum())).save()
        whole[1, 0] = 7
        again = row[0].item().save()
    return {
        "whole": whole,
        "row": row,
        "table": torch.from_numpy(table),
        "seen": seen,
        "again": again,
    }


@block
def names_of_the_last_run_that_are_bound_first(b: Any) -> dict[str, Any]:
    layers, ops = b.layers, b.ops
    found, late = [torch.ones(3)], torch.ones(3)
    for _ in range(2):
        with b.trace(PROMPT, steps=2) as tracer:
            found = [].save()
            for step in tracer.iter[:2]:
                if step:
                    late = late + ops.mlp(layers[20])[-1, :3]
                found.append(late * 1)
            late = late.save()
    return {"found": found, "late": late}


@block
def writes_past_the_version_of_a_value(b: Any) -> dict[str, Any]:
    layers, ops, model = b.layers, b.ops, b.model
    with b.trace(PROMPT, steps=2) as tracer:
        found = [].save()
        for _ in tracer.iter[:2]:
            early = ops.mlp(layers[3])
            early.data[-1] *= 2
            ops.mlp(layers[5]).detach().numpy()[:] *= 0.5
            late = ops.mlp(layers[24])
            late[0] += early[-1]
            late.data[-1] = early.detach().numpy()[-1, 0].item()
            np.asarray(ops.mlp(layers[26]).detach())[-1, :7] = 0.25
            found.append((late.sum(), early[-1], ops.logits(model)))
    return {"found": found}
