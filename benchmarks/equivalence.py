"""Whether what a workload gave on one backend is what it gave on another.

Two results agree where every distribution over next tokens has the same best token, no two are
further apart than the limit, and no value is. That alone would call two runs equal in which an edit
did nothing on either, so an effect is asked for too: an edit must have moved its backend's own
untouched distribution, and what is only read must differ from prompt to prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

MOST_VARIATION = 1e-4
# Of the largest number in the reference's value; two orders over what float32 rounding leaves.
MOST_VALUE_DIFFERENCE = 1e-3
LEAST_EFFECT = 1e-2

Result = Mapping[Any, torch.Tensor]


class Verdict(NamedTuple):
    """What the comparison of a cell with its reference has found.

    Attributes:
        word: EQUIVALENT, DIFFERENT, NO EFFECT, or REFUSED and FAILED for what gave no result.
        top1: The part of the distributions with the same best token.
        variation: The largest total variation between two distributions of one name.
        difference: The largest difference of two numbers of one name.
        relative: The same, as a part of the largest number of that name in the reference.
        effect: How far this backend's result is from its own untouched one, or its values from
            those of another prompt.
        why: What is wrong, or was refused; empty where nothing is.
    """

    word: str
    top1: float = float("nan")
    variation: float = float("nan")
    difference: float = float("nan")
    relative: float = float("nan")
    effect: float = float("nan")
    why: str = ""


def is_distribution(key: Any) -> bool:
    """Say whether the values under ``key`` are logits."""
    return isinstance(key, tuple) and key[0] == "logits"


def total_variation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the total variation between the distributions of two rows of logits."""
    chances = one.double().softmax(-1), other.double().softmax(-1)
    return float((chances[0] - chances[1]).abs().sum(-1).max()) / 2


def effect_of_edit(edited: Result, untouched: Result) -> float:
    """Return the smallest total variation between edited logits and their prompt's untouched ones.

    Of the steps of one generation, and of the places of one sweep, the largest counts: some of them
    may do nothing. Edits that have names of their own count each.
    """
    groups: dict[Any, list[float]] = {}
    for key, logits in edited.items():
        if is_distribution(key):
            beside = untouched.get(key, untouched["logits", key[1], 0])
            name = key[2] if isinstance(key[2], str) else ""
            groups.setdefault((key[1], name), []).append(total_variation(logits, beside))
    return min((max(effects) for effects in groups.values()), default=0.0)


def effect_of_prompt(values: Result) -> float:
    """Return by how much the values of the first prompt differ from the second's.

    That is the median over the numbers of a value, each as a part of its own size: the first token
    is the same in all prompts and may be a hundred times as large as the others. Of the values of
    one kind (a layer each, say) the median counts, as two numbers may be close by chance; of the
    kinds the least.
    """
    kinds: dict[Any, list[float]] = {}
    for key, value in values.items():
        other = values.get((key[0], 1, *key[2:])) if key[1] == 0 else None
        if other is not None and other.shape == value.shape:
            size = value.abs() + other.abs()
            parts = ((value - other).abs() / size)[size > 0]
            effect = float(parts.median()) if parts.numel() else 0.0
            kinds.setdefault(key[0], []).append(effect)
    return min((statistics.median(effects) for effects in kinds.values()), default=0.0)


def compare(got: Result, reference: Result, effect: float) -> Verdict:
    """Return what ``got`` is beside ``reference``."""
    if set(got) != set(reference):
        lacking = sorted(map(str, set(reference) ^ set(got)))
        return Verdict("DIFFERENT", effect=effect, why=f"only one has {', '.join(lacking[:3])}")
    agreed: list[bool] = []
    variation = difference = relative = 0.0
    worst = ""
    for key, wanted in reference.items():
        value = got[key]
        if value.shape != wanted.shape:
            why = f"{key} is {list(value.shape)}, not {list(wanted.shape)}"
            return Verdict("DIFFERENT", effect=effect, why=why)
        if not bool((torch.isfinite(value) & torch.isfinite(wanted)).all()):
            return Verdict("DIFFERENT", effect=effect, why=f"{key} is not finite")
        here = float((value.double() - wanted.double()).abs().max()) if value.numel() else 0.0
        difference = max(difference, here)
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        part = here / scale if scale else (float("inf") if here else 0.0)
        if part > relative:
            relative, worst = part, str(key)
        if is_distribution(key):
            agreed.append(int(value.argmax()) == int(wanted.argmax()))
            variation = max(variation, total_variation(value, wanted))
    top1 = sum(agreed) / len(agreed) if agreed else 1.0
    figures = (top1, variation, difference, relative, effect)
    if top1 < 1 or variation > MOST_VARIATION or relative > MOST_VALUE_DIFFERENCE:
        return Verdict("DIFFERENT", *figures, why=f"furthest apart: {worst}")
    if effect < LEAST_EFFECT:
        return Verdict("NO EFFECT", *figures, why=f"the effect is below {LEAST_EFFECT}")
    return Verdict("EQUIVALENT", *figures)
