"""What the contenders are timed on: loops over generated tokens, one request for each prompt.

`Load` says which; the functions are the blocks of this library, on any of its engines. Each returns
what it has saved, so that the contenders' values can be compared.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

# One token each, with a capital too.
WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "that", "it", "with", "as", "his", "on",
    "be", "at", "by", "this", "had", "not", "are", "but", "from", "or", "have", "an", "they",
    "which", "one", "you", "her", "all", "she", "there", "would", "their", "we",
)  # fmt: skip


class Load(NamedTuple):
    """One thing that is timed.

    Attributes:
        kind: ``untraced``, ``read``, ``steer``, ``cross`` or ``first``.
        num_prompts: Requests in flight.
        length: Words of a prompt.
        tokens: Generated for each.
        layers: ``one``, ``half`` or ``all``.
        rows: ``last`` or ``all`` tokens of a step.
    """

    kind: str
    num_prompts: int = 1
    length: int = 16
    tokens: int = 16
    layers: str = "one"
    rows: str = "last"

    @property
    def name(self) -> str:
        """Names it from run to run."""
        return "-".join(str(part) for part in self)

    @property
    def title(self) -> str:
        """Say it in words."""
        where = {"one": "one layer", "half": "half the layers", "all": "all layers"}[self.layers]
        what = {
            "untraced": "no block",
            "read": f"read {where}, {self.rows} tokens",
            "steer": f"steer {where}, all tokens",
            "cross": "write on the last stage with a value of the first",
            "first": "first value in hand",
        }[self.kind]
        return f"{what}; {self.num_prompts} in flight, prompt {self.length}"

    def indices(self, num_layers: int) -> list[int]:
        """Return the layers of a model that are meant."""
        middle = num_layers // 2
        return {
            "one": [middle],
            "half": list(range(0, num_layers, 2)),
            "all": list(range(num_layers)),
        }[self.layers]

    def prompts(self, number: int) -> list[str]:
        """Return the prompts of one sample, alike for all contenders and unlike all others.

        So no engine finds them in its cache.
        """
        drawn = random.Random(f"{self.name} {number}")
        one = [" ".join(drawn.choices(WORDS, k=self.length)) for _ in range(self.num_prompts)]
        return [f"{text[0].upper()}{text[1:]}" for text in one]


def push_of(hidden: int) -> torch.Tensor:
    """Return the vector that is added."""
    return torch.randn(hidden, generator=torch.Generator().manual_seed(7)) * 0.5


@torch.no_grad()
def read(model: Any, load: Load, prompts: list[str], options: dict[str, Any]) -> dict[Any, Any]:
    """Save the streams behind layers, at each step."""
    layers, tokens = load.indices(len(model.layers)), load.tokens
    rows = slice(-1, None) if load.rows == "last" else slice(None)
    with model.trace(**options) as tracer:
        got = {}.save()
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                for step in tracer.iter[:tokens]:
                    for index in layers:
                        got[number, step, index] = model.layers[index].residual[rows]
    return {"values": got, "tracer": tracer}


@torch.no_grad()
def steer(model: Any, load: Load, prompts: list[str], options: dict[str, Any]) -> dict[Any, Any]:
    """Add a vector to the streams behind layers, at each step."""
    layers, tokens = load.indices(len(model.layers)), load.tokens
    push = push_of(model.config.hidden_size)
    with model.trace(**options) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:tokens]:
                    for index in layers:
                        model.layers[index].residual[:] += push
    return {"values": {}, "tracer": tracer}


@torch.no_grad()
def cross(model: Any, load: Load, prompts: list[str], options: dict[str, Any]) -> dict[Any, Any]:
    """Change the last stage with a value of the first one, at each step."""
    tokens = load.tokens
    with model.trace(**options) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:tokens]:
                    early = model.layers[0].residual[-1]
                    model.layers[-1].residual[-1] += 0.01 * early
    return {"values": {}, "tracer": tracer}


@torch.no_grad()
def first(model: Any, load: Load, prompts: list[str], options: dict[str, Any]) -> dict[Any, Any]:
    """Read one value, and end the request there."""
    (index,) = load.indices(len(model.layers))
    (prompt,) = prompts
    with model.trace(prompt, **options) as tracer:
        value = model.layers[index].residual[-1:].save()
        tracer.stop()
    return {"values": {(0, 0, index): value}, "tracer": tracer}


BLOCKS = {"read": read, "steer": steer, "cross": cross, "first": first}
