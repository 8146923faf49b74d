"""Random straight-line programs: on a lazy value they give what they give on the real one."""

from __future__ import annotations

from typing import Any

import greenlet
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.sources import lazy
from nnsight_pp.core.protocols import RemoteValue

# Programs work on a pair of [3, 4] tensors ``x`` and two more names, `a` and `b`.
VIEWS = ["x[0]", "x[1]", "a", "b"]
ROWS = ["[0]", "[-1]", "[1]", "[-1].clone()", "[0] * 2", ".sum(0)", "[2].detach()", ".clone()[1]"]
# fmt: off
STATEMENTS = [
    "{v}[0] += {r}", "{v}[:] = {n}", "{v}[-1] = {r}", "{v} += {r}", "{v} *= {n}", "{v}.add_({n})",
    "{v}[1:, 0].zero_()", "{v}[..., 1] -= {n}", "{v}[-1].copy_({r})", "{v}.clamp_(-50, 50)",
    "torch.neg_({v})", "torch.add({v}, {n}, out={v})",
    "torch.nn.functional.relu({v}, inplace=True)",
    "{v}[{v} > {n}] = 0", "{v}[[0, 2]] += {n}",
    "a = {v}", "b = {v}.clone()", "a = {v}[...]", "b = {v} + {r}", "a = {v}.view(3, 4)",
    "b = torch.stack([{r}, {r}, {r}])", "a = {v}.remainder(7)", "a, b = x", "b = copy.copy({v})",
    "b = copy.deepcopy({v})", "a = torch.where({v} > {n}, {v}, -{v})", "a = {v}.T.T",
    "if float({v}[-1].sum()) > {n}: {v}[0] = {n}", "out.append({v})", "out.append({r})",
    "out.append(float({v}.sum()))", "out.append({v}[-1].tolist())", "out.append(len({v}))",
    "out.append({v}.clone())", "out.append(f'{{{v}[0, 0]:.3f}}')", "out.append(tuple({v}.shape))",
    "out.append(isinstance({v}, torch.Tensor))", "out.append([int(e) for e in {v}[0]])",
    "out.append(bool(({r} == {r}).all()))", "mine[0] += {r}", "mine[1] = {r}",
    "out.append(mine.clone())",
]
# fmt: on


@st.composite
def programs(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 14))):
        statement = draw(st.sampled_from(STATEMENTS))
        line = ""
        # Each {r} is another row.
        for piece in statement.replace("{v}", draw(st.sampled_from(VIEWS))).split("{r}"):
            row = draw(st.sampled_from(VIEWS)) + draw(st.sampled_from(ROWS))
            line += (f"({row})" if line else "") + piece
        lines.append(line.replace("{n}", str(draw(st.integers(-3, 9)))).replace("{{", "{"))
    return "\n".join(lines).replace("}}", "}")


def start() -> Any:
    first = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    return first, first * 3 - 11


def outcome(program: str, x: Any) -> tuple[list[Any], str]:
    scope: dict[str, Any] = {"torch": torch, "copy": __import__("copy"), "x": x, "out": []}
    scope["a"], scope["b"] = x[0], x[1]
    scope["mine"] = torch.zeros(2, 4, dtype=torch.float64)
    error = ""
    try:
        # As a block: the `try` around it is not one of the program's.
        greenlet.greenlet(lambda: exec(program, scope)).switch()
    except (RuntimeError, IndexError, ValueError, TypeError) as raised:
        error = type(raised).__name__
    values = [*scope["out"], scope["a"], scope["b"], scope["mine"], x[0], x[1]]
    return values, error


def plain(value: Any) -> Any:
    if issubclass(type(value), RemoteValue):
        value = value._real_value()
    return value.tolist() if isinstance(value, torch.Tensor) else value


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(programs())
def test_random_programs_give_the_same_on_a_lazy_value(program: str):
    wanted, error = outcome(program, start())
    if error:
        return  # what fails on the owner fails the block
    stand_in, source = lazy(start())
    found, late = outcome(program, stand_in)
    assert late == ""
    assert list(map(plain, found)) == list(map(plain, wanted))
    assert source.pulls.count(()) <= 1
