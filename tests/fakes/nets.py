"""Small torch modules of this process, and user files that run on them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + self.act(self.fc(x)) * scale


class Net(nn.Module):
    """Three layers and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.head(x)

    def rollout(self, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
        """Run the layers several times, as a generation does."""
        for _ in range(steps):
            for layer in self.layers:
                x = layer(x)
        return x

    def forwards(self, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
        """Run the whole model several times."""
        return torch.stack([self(x + step) for step in range(steps)])


def batch(rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def run_file(folder: Path, text: str, name: str = "user_code", **names: Any) -> dict[str, Any]:
    """Write ``text`` as a user's file, run it with ``names`` defined, and return its names."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    found = {"__name__": name, "__file__": str(path), **names}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), found)
    return found
