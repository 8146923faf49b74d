"""Which locations no cache sees, and which requests a preemption would change."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from nnsight_pp.core.location import LOGITS, Location
from nnsight_pp.core.rows import Rows, TokenCut
from nnsight_pp.engines.vllm.compat import Scheduled
from nnsight_pp.engines.vllm.past_edits import PastEdits, behind_caches

ORDER = [
    Location(path, kind)
    for path, kind in [
        ("m.0.attn", "input"),
        ("m.0.attn", "output"),
        ("m.rotary", "output"),
        ("m.1.attn", "input"),
        ("m.1.attn", "output"),
        ("m.rotary", "output"),
        ("m.1.mlp", "output"),
        ("m.norm", "output"),
    ]
]


def traced(cut: TokenCut) -> Any:
    return SimpleNamespace(worker=SimpleNamespace(cut=cut), has_edited=False, request="r")


def resumed(is_resumed: bool = True) -> Scheduled:
    return Scheduled("r", 7, 12, 0, is_resumed=is_resumed)


def test_what_lies_behind_the_last_attention_reaches_no_cache():
    assert behind_caches(ORDER, {"m.0.attn", "m.1.attn"}) == {
        Location("m.1.attn", "output"),
        Location("m.1.mlp", "output"),
        Location("m.norm", "output"),
    }
    assert behind_caches(ORDER, set()) == frozenset()


@pytest.mark.parametrize(
    ("location", "is_lost"),
    [(ORDER[1], True), (ORDER[5], True), (ORDER[6], False), (LOGITS, False)],
)
def test_an_edit_that_a_cache_has_seen_would_be_lost(location: Location, is_lost: bool):
    past = PastEdits(behind_caches(ORDER, {"m.0.attn", "m.1.attn"}))
    cut = TokenCut(Rows(1, 2, 4))
    request = traced(cut)
    value = torch.zeros(4, 3)
    mine = cut.give(value)
    marks = cut.marks(mine)
    cut.put(value, mine, marks, assigned=False)
    past.note(location, [(request, 3)])
    assert past.lost(request, resumed(), "here") is None, "it has only looked"
    mine[0] = 1.0
    cut.put(value, mine, marks, assigned=False)
    past.note(location, [(request, 3)])
    assert (past.lost(request, resumed(), "here") is not None) == is_lost
    assert past.lost(request, resumed(False), "here") is None
    assert value[1, 0] == 1.0
