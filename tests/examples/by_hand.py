"""What the examples compute, by forward hooks on the bare Hugging Face model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

# A number as the examples print them: not a part of a word, not `' 3'` in quotes.
NUMBER = re.compile(r"(?<![\w'\"])[+-]?\d+(?:\.\d+)?(?![\w'\"])")
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


def numbers(text: str) -> list[float]:
    """Return the numbers of ``text`` that stand outside quotes."""
    return [float(found) for found in NUMBER.findall(QUOTED.sub("''", text))]


def words(text: str) -> list[str]:
    """Return ``text`` without its numbers."""
    return NUMBER.sub("#", text).split()


@contextlib.contextmanager
def changed(*changes: tuple[Any, Callable[[torch.Tensor], Any]]) -> Iterator[None]:
    """Let each function change its module's output in place, or return another one."""

    def hook_of(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            new = change(tensor)
            if new is None:
                return output
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    hooks = [module.register_forward_hook(hook_of(change)) for module, change in changes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def outputs(hf: Any, modules: list[Any], ids: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """Return what each module gives for a prompt, ``[T, H]``, and the last token's logits."""
    seen: list[Any] = []

    def keep(tensor: torch.Tensor) -> None:
        seen.append(tensor[0].clone())

    with changed(*((module, keep) for module in modules)):
        logits = hf(ids).logits[0, -1]
    return seen, logits


def zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)
