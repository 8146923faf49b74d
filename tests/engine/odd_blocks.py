"""Odd ways of touching values, for an engine with one stage and one with two to agree on.

Two stages make every value of the other half a remote one: unpacking, methods that edit in place,
masks, views, numpy, torch's modes, refused asks that are caught, edits that come too late.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine import users_module
from nnsight_pp import NotSupportedError, OutOfOrderError, attention_pattern

if TYPE_CHECKING:
    from nnsight_pp import VLLM

PROMPT = "one two three four five"
ODD: dict[str, Callable[[VLLM, list[Any]], Any]] = {}


def odd(function: Callable[[VLLM, list[Any]], Any]) -> Callable[[VLLM, list[Any]], Any]:
    ODD[function.__name__] = function
    return function


@odd
def unpack(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        h, _ = layers[3].output
        h2, r2 = layers[3].output
        h[:] = 0
        s = (h2.sum() + r2.sum()).save()
        lg = model.logits.save()
    return s, lg


@odd
def methods(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layers[0].output[0].add_(1).mul_(2)
        layers[3].output[0].clamp_(min=0)
        x = layers[3].output[0].save()
        lg = model.logits.save()
    return x, lg


@odd
def tuple_assign(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        h, r = layers[1].output
        layers[1].output = (h * 0.5, r)
        h, r = layers[3].output
        layers[3].output = (r, h)
        lg = model.logits.save()
    return lg


@odd
def masks(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        a = layers[0].mlp.output
        b = layers[3].mlp.output
        b[b > a] = 0
        b[[0, 2]] = a[[0, 2]]
        b[:, 3] = a.mean(1)
        n = (b == 0).sum().item().save()
        lg = model.logits.save()
    return n, lg


@odd
def views(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        a = layers[0].mlp.output
        v = a.view(-1)[:7]
        v.zero_()
        t = layers[3].mlp.output.T
        t[0] = 5
        w = layers[3].mlp.output
        s = w.sum().save()
        q = a.sum().save()
        lg = model.logits.save()
    return s, q, lg


@odd
def inputs(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        args, _ = layers[3].inputs
        k = len(args).save()
        pos = args[0].save()
        h = layers[3].mlp.input
        layers[3].mlp.input = h + 1
        y = layers[3].mlp.input.save()
        z = layers[3].mlp.output.save()
    return k, pos, y, z


@odd
def modes(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tr:
        out = [].save()
        for s in tr.iter[:2]:
            with torch.inference_mode():
                a = layers[0].mlp.output * 2
                b = layers[3].mlp.output + a[-1]
                out.append(b.sum())
    return [float(x) for x in out]


@odd
def numpyish(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        a = layers[0].mlp.output
        b = layers[3].mlp.output
        c = float(np.asarray(a).sum() + np.asarray(b).sum()).save()
        d = {"x": a.tolist()[0][:3], "n": len(b), "f": f"{b[0, 0]:.3f}"}.save()
    return c, d


@odd
def late_edit(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        a = layers[0].mlp.output
        b = layers[3].mlp.output
        a[:] = 0
        s = a.sum().save()
        lg = model.logits.save()
    return s, lg


@odd
def swallow(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        got = "no".save()
        b = layers[3].mlp.output
        try:
            a = layers[0].mlp.output
        except Exception as e:
            got = type(e).__name__.save()
        lg = model.logits.save()
    return got, lg


@odd
def generator_and_class(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):

        class Acc:
            def __init__(self):
                self.t = 0

            def add(self, v):
                self.t = self.t + v.sum()

        acc = Acc()
        for layer in layers:
            acc.add(layer.mlp.output)
        t = acc.t.save()
    return t


@odd
def sort_topk(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        v, i = layers[3].mlp.output.topk(3)
        m = layers[3].mlp.output.max(-1)
        v = v.save()
        i = i.save()
        mm = m.values.save()
    return v, i, mm


@odd
def reassign_same(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        layers[3].mlp.output = layers[0].mlp.output if False else layers[3].mlp.output * 0 + 1
        y = layers[3].mlp.output
        y += 2
        lg = model.logits.save()
        yy = y.save()
    return yy, lg


@odd
def whole_model(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        ids = model.model.embed_tokens.input.save()
        e = model.model.embed_tokens.output.save()
        rot = layers[3].self_attn.rotary_emb.output
        q = rot[0].save()
        n = model.model.norm.output[0].save()
        lp = model.logits_processor.output.save()
        lg = model.logits.save()
    return ids, e, q, n, lp, lg


@odd
def skipsteps(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=6) as tr:
        out = [].save()
        for s in tr.iter[1:6:2]:
            out.append((s, layers[3].mlp.output.sum(), layers[3].mlp.output.shape[0]))
    return [(s, float(x), n) for s, x, n in out]


@odd
def reductions(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tr:
        found = [].save()
        for _ in tr.iter[:2]:
            a = layers[0].mlp.output
            b = layers[3].mlp.output
            norms = a.norm(dim=-1), b.norm(dim=-1)
            b[-1] += norms[0][-1]  # one number of the other stage
            values, ids = torch.topk(model.logits, 3, dim=-1)
            found.append((*norms, a.mean(0), b.var(), values, ids, model.logits.argmax(-1)))
            if bool(a.norm() > b.amax()):
                found.append(a.bfloat16())
    return found


@odd
def handled_errors(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        seen = [].save()
        a = layers[0].mlp.output
        b = layers[3].mlp.output
        for value in (a, b):
            try:
                row = value[99]
                seen.append("not reached")
            except IndexError:
                row = value[-1]
            seen.append(float(row[0]))
            try:
                value.sum(7)
            except IndexError:
                value[0] = 1.0
        lg = model.logits.save()
    return seen, lg


def fails(change: Callable[[], Any]) -> bool:
    try:
        change()
    except (IndexError, RuntimeError, TypeError, ValueError):
        return True
    return False


class Swallow:
    """Ends what fails within it without a word."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> bool:
        return True


@odd
def handled_errors_decide_what_another_stage_writes(model: VLLM, layers: list[Any]) -> Any:
    """No ask and no save tells that a rank has gone on where another one has not."""
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        a = layers[0].mlp.output
        late = layers[3].mlp.output
        factor = 1.0
        for value in (a, late):
            try:
                value[99] = 0
                factor *= 2
            except (IndexError, RuntimeError):
                factor *= 3
            try:
                value.add_(torch.ones(7, 7))
                factor *= 5
            except RuntimeError:
                pass
            try:
                value += torch.ones(7, 7)
                factor *= 7
            except RuntimeError:
                pass
            with contextlib.suppress(IndexError):
                value[-1, 100_000]
                factor *= 11
            with torch.no_grad(), Swallow():
                with torch.no_grad():
                    value[:, :, 0].mul_(2)
                factor *= 13
            factor *= 1 + 17 * fails(lambda one=value: one[99])
            factor *= 1 + 19 * fails(lambda one=value: [part[99] for part in (one,)])
            factor *= 1 + 23 * fails(lambda one=value: one.__setitem__(99, 0))
            factor *= 1 + 29 * fails(lambda one=value: setattr(one, "data", 3))
            factor *= 1 + 31 * fails(lambda one=value: one.topk(10_000))
            factor *= 1 + 37 * fails(lambda one=value: one.sum(7))
        late[:] = late * (factor / 1e6)
        lg = model.logits.save()
    return lg


@odd
def standard_and_physical_values_of_one_place(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        seen = [].save()
        for index in (0, 3):
            h, _ = layers[index].output
            h[0] += 1
            stream = model.layers[index].residual
            seen.append(stream.clone())
            stream[-1] = 0.5
            after = layers[index].output
            seen.append(after[0] + after[1])
            layers[index].output = (after[0] * 2, after[1])
            seen.append(model.layers[index].residual)
            model.layers[index].residual = seen[0] - stream
            seen.append(model.layers[index].residual)
        seen.append(model.final_norm)
        lg = model.logits.save()
    return seen, lg


@odd
def standard_values_in_every_way(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tr:
        found = [].save()
        for _ in tr.iter[:2]:
            a = model.layers[0].residual
            q = model.layers[2].attn.q
            if float(a[-1].norm()) > 0:
                q[:, 0] = q[:, 1]
            z = model.layers[2].attn.z
            z.mul_(0.5)[-1].zero_()
            found.append((z.shape, z, a.mean(), q.sum(-1)))
            model.layers[2].mlp.input = torch.zeros_like(model.layers[2].mlp.input) + a[-1]
            m = model.layers[2].mlp_out
            m += m.abs()
            model.layers[3].residual_in -= m
            found.append(model.layers[3].residual_in)
            found.append(model.layers[3].residual.argmax(-1))
            found.append(model.logits)
    return found


@odd
def a_pattern_then_an_edit_of_what_it_read(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        seen = [].save()
        for index in (1, 2):
            model.layers[index].attn.v[0] = 0
            pattern = attention_pattern(model.layers[index], rows=[-1, 0])
            z = model.layers[index].attn.z
            z[-1] = z[-1] * float(pattern[0, 0, -1])
            seen.append(pattern)
        lg = model.logits.save()
    return seen, lg


@odd
def standard_values_that_are_refused(model: VLLM, layers: list[Any]) -> Any:
    seen = []
    for index, other in ((0, 0), (3, 3), (2, 1)):
        try:
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                x = model.layers[index].residual
                y = (x + model.layers[other].attn.output).save()
        except OutOfOrderError as error:
            seen.append(str(error).splitlines()[0])
    return seen


@odd
def containers_in_containers_around_a_block(model: VLLM, layers: list[Any]) -> Any:
    by_place: dict[str, list[Any]] = {"early": [], "late": []}
    inner = by_place["late"]
    board = ([torch.zeros(2)], {0})
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        early, late = layers[0].mlp.output, layers[3].mlp.output
        by_place["early"].append(early[-1])
        by_place["late"].append(late[-1])
        board[0][0][1] = float(late.sum())
        board[1].add(len(early))
    assert by_place["late"] is inner
    assert (len(inner), len(by_place["early"]), board[1]) == (1, 1, {0, 5})
    assert board[0][0][1] != 0
    return by_place, board[0]


@odd
def one_object_and_one_memory(model: VLLM, layers: list[Any]) -> Any:
    array, probe, outer = np.zeros(4, dtype=np.float32), torch.nn.Linear(4, 1, bias=False), [0.0]
    shown = torch.from_numpy(array)
    with torch.no_grad():
        probe.weight.fill_(0.5)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        early = layers[0].mlp.output.save()
        late = layers[3].mlp.output.clone().save()
        row = late[0].save()
        turned = late.T.save()
        rows = [row, early]
        both = (rows, {"rows": rows}, outer).save()
        array[0] = late[0, 0]
        shown[1] = late[0, 1]
        outer.append(float(early[0, 0]))
        with torch.enable_grad():
            probe(late[:, :4].detach()).sum().backward()
    late[0, 2] = 100
    assert row[2] == turned[2, 0] == 100
    assert both[0] is both[1]["rows"]
    assert both[0][0] is row
    assert both[0][1] is early
    assert both[2] is outer
    assert array[:2].all()
    return late, array.tolist(), outer, probe.weight.grad


@odd
def a_default_dtype_of_its_own(model: VLLM, layers: list[Any]) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        torch.set_default_dtype(torch.float64)
        late = layers[3].mlp.output.save()
        double = torch.zeros(2).save()
        torch.set_default_dtype(torch.float32)
    assert double.dtype == torch.float64
    with contextlib.suppress(NotSupportedError):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            torch.set_default_dtype(torch.float64)
            logits = model.logits
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        logits = model.logits.save()
        single = torch.zeros(2).save()
    assert single.dtype == torch.float32
    return late, logits


@contextlib.contextmanager
def settings_of_the_user() -> Iterator[None]:
    torch.set_printoptions(precision=2, sci_mode=False)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.device("meta"), np.errstate(divide="raise"), np.printoptions(precision=3):
            yield
    finally:
        torch.set_printoptions(profile="default")
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


@odd
def settings_around_a_trace(model: VLLM, layers: list[Any]) -> Any:
    number = torch.tensor([1.23456, 100000.0])
    outer = [[str(number), str(np.array([1.23456]))], "meta", "high", True, "raise"]
    with settings_of_the_user(), model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        seen = [].save()
        for _ in tracer.iter[:2]:
            early, late = layers[0].mlp.output.clone().save(), layers[3].mlp.output.clone().save()
            seen.append(
                [
                    [str(number), str(np.array([1.23456]))],
                    torch.zeros(1).device.type,
                    torch.get_float32_matmul_precision(),
                    torch.are_deterministic_algorithms_enabled(),
                    np.geterr()["divide"],
                ]
            )
    with settings_of_the_user():
        outer[0] = [str(number), str(np.array([1.23456]))]
    assert seen == [outer, outer]
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        fresh = [torch.get_float32_matmul_precision(), str(number), np.geterr()["divide"]].save()
    assert fresh == ["highest", str(number), "warn"]
    with pytest.raises(NotSupportedError, match="autocast"):
        with torch.autocast("cpu"), model.trace(PROMPT, temperature=0.0, max_tokens=1):
            late = layers[3].mlp.output.save()
    return early, late


@odd
def a_module_that_is_imported_inside(model: VLLM, layers: list[Any]) -> Any:
    def added() -> int:
        import engine.users_module as own

        return own.add()

    users_module.counter, users_module.rows = 5, [1.0]
    with model.trace(PROMPT, temperature=0.0, max_tokens=2) as tracer:
        from engine.users_module import rows

        late = layers[3].mlp.output.clone().save()
        rows.append(float(late[0, 0]))
        counts = [].save()
        for _ in tracer.iter[:2]:
            model.logits.sum()
            counts.append(added())
        import engine.users_module

        engine.users_module.counter += 1
    assert counts == [6, 7]
    assert users_module.counter == 8
    assert len(users_module.rows) == 2
    users_module.counter = 0
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        from engine.users_module import counter

        found = counter.save()
    assert found == 0
    return late, users_module.rows


@odd
def what_would_change_a_rank_is_refused(model: VLLM, layers: list[Any]) -> Any:
    def variable() -> str:
        return users_module.variable()

    words = []
    try:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            found = variable().save()
    except NotSupportedError as error:
        words.append(str(error))
    try:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            late = layers[3].mlp.output.save()
            torch.nn.functional.gelu = abs
    except NotSupportedError as error:
        words.append(str(error))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        with torch.no_grad(), np.errstate(all="ignore"), torch.random.fork_rng():
            logits = model.logits.save()
    assert "users_module.py" in words[0]
    assert "found = variable().save()" in words[0]
    assert "torch.nn.functional.gelu = abs  <- here" in words[1]
    assert torch.nn.functional.gelu is not abs
    return logits
