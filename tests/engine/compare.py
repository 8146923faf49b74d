"""How values of two backends are compared, with the tolerance stated once.

fp32: hidden states agree when their cosine is above 0.99999 and no element differs by more than
1e-3 of the value's own largest element. Everything that is not floating point is equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from engine.backends import Engine


class ChangedNeighbourError(AssertionError):
    """A request beside a block got something else than it gets alone."""


def assert_same(found: Any, wanted: Any, where: str = "value") -> None:
    """Fail unless ``found`` is ``wanted`` up to the stated tolerance."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where} is a {type(found).__name__}"
        _assert_close(found, wanted, where)
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), f"{where} has keys {sorted(found)}"
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted), where
        assert len(found) == len(wanted), f"{where} has {len(found)} items, not {len(wanted)}"
        for index, value in enumerate(wanted):
            assert_same(found[index], value, f"{where}[{index}]")
    elif isinstance(wanted, float):
        close = found == wanted or abs(found - wanted) <= 1e-3 * max(abs(wanted), 1e-6)
        assert close, f"{where}: {found} {wanted}"
    else:
        assert found == wanted, f"{where} is {found!r}, not {wanted!r}"


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    assert found.shape == wanted.shape, f"{where}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{where}: {found.dtype}, not {wanted.dtype}"
    if wanted.is_complex():
        found, wanted = torch.view_as_real(found), torch.view_as_real(wanted)
    if not wanted.is_floating_point() or not wanted.numel():
        assert torch.equal(found, wanted), where
        return
    found, wanted = found.detach().double().flatten(), wanted.detach().double().flatten()
    scale = wanted.abs().max().clamp(min=1e-12)
    worst = ((found - wanted).abs().max() / scale).item()
    assert worst < 1e-3, f"{where}: an element differs by {worst:.2g} of the value's scale"
    if wanted.numel() > 1 and wanted.any():
        cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=0).item()
        assert cosine > 0.99999, f"{where}: cosine {cosine:.7f}"


def logits_of(engine: Engine, prompt: str) -> torch.Tensor:
    logits: Any = None
    with engine.model.trace(prompt, temperature=0.0, max_tokens=1):
        logits = engine.model.logits.save()
    return logits[0]


def assert_logits_as(hub: Any, engine: Engine, prompt: str) -> torch.Tensor:
    """A traced and an untraced request give what Hugging Face's ``hub`` gives; returns that."""
    ids = engine.tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        wanted = hub(ids).logits[0, -1]
    found = logits_of(engine, prompt)
    torch.testing.assert_close(found[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)
    (output,) = engine.model.generate(prompt, temperature=0.0, max_tokens=1, logprobs=3)
    for token, one in output.outputs[0].logprobs[0].items():
        assert abs(one.logprob - float(wanted.log_softmax(0)[token])) < 1e-4
    return wanted
