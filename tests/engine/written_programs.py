"""Random programs for a tiny Llama: written as the functions that a user would write, and run."""

from __future__ import annotations

import linecache
import random
import traceback
import warnings
from typing import Any, NamedTuple

import numpy
import torch
from hypothesis import strategies as st

from fakes.drawn_programs import bodies, refusal_in
from fakes.programs import Toy
from nnsight_pp import VLLM, OutOfOrderError

PROMPTS = ("one two three four five", "a small river", "the last of the three prompts")
# Of a statement: out of order or raising; a call or a weight; a drawn number.
KINDS = ((0.0, 0.1, 0.0), (0.06, 0.0, 0.0), (0.0, 0.2, 0.1), (0.2, 0.05, 0.0))
HEAD = """
def block(model, prompt, steps):
    L = list(model.model.layers)
    options = {"temperature": 0.0, "max_tokens": steps, "ignore_eos": True}
    with model.trace(prompt, **options) as tracer:
        out = [].save()
"""
TAIL = "    return out\n"


class Llama(Toy):
    """How a program names what a tiny Llama on vLLM has.

    Even layers are touched at their mlp, odd ones as a whole, whose output is a tuple. What the toy
    computes exactly is done here so that a last bit decides on nothing.
    """

    num_layers = 4
    width = 128
    dtype = "torch.float32"
    steps = "tracer.iter"
    result = "list(tracer.result.outputs[0].token_ids)"
    has_ghost = False

    def whole(self, layer: int) -> str:
        return f"L[{layer}].output" if layer % 2 else f"L[{layer}].mlp.output"

    def input(self, layer: int) -> str:
        return f"L[{layer}].{'input_layernorm' if layer % 2 else 'mlp'}.input"

    def call(self, layer: int, given: str) -> str:
        return f"L[{layer}].post_attention_layernorm({given})"

    def constant(self, layer: int) -> str:
        return f"L[{layer}].input_layernorm.weight[None]"

    def bounded(self, value: str) -> str:
        return f"torch.tanh({value})"

    def bound_in_place(self, name: str) -> str:
        return f"{name}.clamp_(-9.0, 9.0)"

    def test(self, row: str) -> str:
        return f"float({row}.sum()) > 0.05"


class Program:
    """One block, its prompt and its number of steps."""

    def __init__(self, source: str, prompt: str, steps: int) -> None:
        self.source = source
        self.prompt = prompt
        self.steps = steps

    def __repr__(self) -> str:
        return (
            f"block(model, {self.prompt!r}, {self.steps}) of\n"
            "import random\nimport numpy\nimport torch\nfrom nnsight_pp import OutOfOrderError\n"
            f"{self.source}"
        )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    body = draw(bodies(Llama(), KINDS))
    prompt = draw(st.sampled_from(PROMPTS))
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    lines = lines.replace("(rows if", f"({1 + len(prompt.split())} if")
    return Program(HEAD + lines + TAIL, prompt, draw(st.integers(1, 4)))


_num_run = 0


class Outcome(NamedTuple):
    """What a user sees: the values, or the error's class and line, and the warnings."""

    found: Any
    warnings: list[str]
    words: str = ""

    @property
    def seen(self) -> tuple[Any, list[str]]:
        """What must be alike on every number of stages: words name the stage."""
        return self.found, self.warnings

    @property
    def refusal(self) -> str | None:
        """Which documented refusal of several stages this is."""
        return refusal_in(self.found[0], self.words) if self.words else None


def outcome(program: Program, model: VLLM) -> Outcome:
    """Run ``program`` on ``model``."""
    global _num_run
    _num_run += 1
    filename = f"<program {_num_run}>"
    text = program.source
    # As a notebook does; the code of the last run of the same text would be found otherwise.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    names = {
        "torch": torch, "random": random, "numpy": numpy, "OutOfOrderError": OutOfOrderError,
    }  # fmt: skip
    exec(compile(text, filename, "exec"), names)
    torch.manual_seed(3)
    words = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: Any = names["block"](model, program.prompt, program.steps)
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
                     if f.filename == filename]  # fmt: skip
            found, words = (type(error).__name__, lines[-1:]), f"{error} "
        finally:
            del linecache.cache[filename]
    return Outcome(found, [one.category.__name__ for one in caught], words)
