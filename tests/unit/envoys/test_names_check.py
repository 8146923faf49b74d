"""What the check of the standard names finds true and untrue."""

from __future__ import annotations

import torch

from nnsight_pp.envoys.architectures import location_of
from nnsight_pp.envoys.names_check import NamesCheck, growth_error


def layer(scale=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    before, attn, mlp = (torch.randn(4, 8).to(dtype) for _ in range(3))
    return before, attn, mlp, before + scale * attn + mlp


def test_a_stream_that_grows_by_its_parts_is_true_in_any_precision():
    assert growth_error(*layer()) == ""
    assert growth_error(*layer(dtype=torch.bfloat16)) == ""


def test_a_stream_that_grows_by_something_else_is_not():
    assert "off by" in growth_error(*layer(scale=1.1))
    before, attn, mlp, after = layer()
    assert "off by" in growth_error(before, attn, mlp, after.fill_(float("nan")))
    assert "different shapes" in growth_error(before, attn[:2], mlp, after)


def noted(values):
    check = NamesCheck(2)
    for index in range(2):
        names = (("", "residual_in"), ("attn", "output"), ("mlp", "output"), ("", "residual"))
        for (part, name), value in zip(names, values, strict=True):
            check.note(location_of(index, part, name), value)
    return check


def test_parts_of_a_layer_that_scales_them_are_untrue_and_its_stream_is_not():
    found = noted(layer(scale=2.0)).untrue_parts()
    parts = {f"model.layers.{index}.{part}.output" for index in (0, 1) for part in ("attn", "mlp")}
    assert {*found} == parts
    assert noted(layer()).untrue_parts() == {}


def test_layers_that_this_rank_does_not_run_are_left_to_others():
    check = NamesCheck(2)
    check.note(location_of(0, "", "residual"), torch.ones(1, 2))
    assert check.untrue_parts() == {}
    assert check.untrue_end(torch.nn.Identity(), None, None) == {}


def test_a_norm_or_a_head_of_something_else_is_found():
    check = noted(layer())
    stream = check.value(location_of(1, "", "residual"))
    assert stream is not None
    check.note(location_of(None, "", "final_norm"), 2 * stream)
    head = torch.nn.Linear(8, 5)
    logits = head(2 * stream).tanh()[-1:]
    assert check.untrue_end(lambda x: 2 * x, head, logits) == {}
    other_stream = check.untrue_end(lambda x: x, head, logits)
    assert {"model.final_norm", "model.embeddings", "model.layers.1.residual"} <= {*other_stream}
    assert list(check.untrue_end(lambda x: 2 * x, head, -logits)) == ["model.final_norm"]
