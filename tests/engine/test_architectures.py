"""Tiny models of seven families on two stages, against Hugging Face's own modules.

Three families run with the other tests, `NNSIGHT_PP_MATRIX=1` runs all seven.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import architectures, standard_blocks
from engine.compare import assert_same
from fakes.models import FAMILIES, make_tiny
from nnsight_pp import VLLM, LanguageModel, NNsight, NotServedError, NotSupportedError

# The most different ones: tied embeddings and no residual stream beside the hidden states, caps and
# norms of its own, and experts.
FEW = ("gpt2", "gemma2", "mixtral")
CHOSEN = tuple(FAMILIES) if os.environ.get("NNSIGHT_PP_MATRIX") else FEW


class Family:
    """One family: its model on two stages, and what Hugging Face's gives."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.reference = _reference(path)
        self.path = path
        self.model = VLLM(
            str(path),
            pipeline_parallel_size=2,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            kv_cache_memory_bytes=64 << 20,
        )
        model = self.model
        self.backend = SimpleNamespace(
            model=model,
            ops=architectures.ON_VLLM,
            trace=lambda prompt, steps=1: model.trace(
                prompt, temperature=0.0, max_tokens=steps, ignore_eos=True
            ),
        )


def _reference(path: Path) -> dict[str, Any]:
    """Return what each block gives on Hugging Face's model in this process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    settings = module.generation_config
    settings.do_sample, settings.pad_token_id, settings.eos_token_id = False, 0, None
    model = NNsight(module)

    def trace(prompt: str, steps: int = 1) -> Any:
        encoded = tokenizer(prompt, return_tensors="pt")
        return model.trace(
            encoded.input_ids,
            attention_mask=encoded.attention_mask,
            fn="generate",
            max_new_tokens=steps,
        )

    local = SimpleNamespace(model=model, ops=architectures.LOCAL, trace=trace)
    with torch.no_grad():
        return {name: run(local) for name, run in architectures.BLOCKS.items()}


@pytest.fixture(scope="module", params=CHOSEN)
def family(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp("families") / request.param
    family = Family(request.param, make_tiny(request.param, folder, smollm2_path))
    with contextlib.closing(family.model):
        yield family


@pytest.mark.parametrize("name", architectures.BLOCKS)
def test_a_family_gives_its_own_values_on_two_stages(family: Family, name: str) -> None:
    assert_same(architectures.BLOCKS[name](family.backend), family.reference[name], name)
    assert family.model.request_counts() == [0, 0]


@pytest.mark.parametrize("name", standard_blocks.BLOCKS)
def test_one_text_in_standard_names(family: Family, name: str) -> None:
    # Not sdpa, which leaves out Gemma 2's soft cap.
    local = LanguageModel(
        str(family.path), dtype=torch.float32, attn_implementation="eager", dispatch=True
    )
    run = standard_blocks.BLOCKS[name]
    if family.name == "granite" and name in standard_blocks.OF_PARTS:
        for model, start in (
            (local, standard_blocks.on_language_model(local)),
            (family.model, standard_blocks.on_vllm(family.model)),
        ):
            with pytest.raises(NotSupportedError, match=r"output does not mean what it says"):
                run(model, start)
        return
    with torch.no_grad():
        wanted = run(local, standard_blocks.on_language_model(local))
    assert_same(run(family.model, standard_blocks.on_vllm(family.model)), wanted, name)
    assert family.model.request_counts() == [0, 0]


def test_modules_that_some_ranks_only_build_have_one_owner(family: Family) -> None:
    """The first stage has no norm or head in some families, an idle one in others."""
    model = family.model
    with model.trace(architectures.PROMPT, temperature=0.0, max_tokens=1):
        embedded = architectures.embedding_of(model).output.save()
        normed = architectures.norm_of(model).output
        normed = (normed[0] if isinstance(normed, tuple) else normed).save()
        whole = model.logits_processor.output.save()
        logits = model.logits.save()
    assert_same(whole, logits, "logits")
    assert embedded.shape == normed.shape


def test_what_vllm_does_not_call_is_refused_by_name(family: Family) -> None:
    model = family.model
    # Gemma2 has no head of its own.
    silent = model.lm_head if hasattr(model, "lm_head") else model.model.layers
    with pytest.raises(NotServedError, match=r"lm_head|layers"):
        with model.trace(architectures.PROMPT, temperature=0.0, max_tokens=1):
            silent.output.save()
