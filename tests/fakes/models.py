"""Tiny random models as Hugging Face folders, for engines that want a path.

Small enough to start in a second, and real enough to be split: four layers, and
a head size that vLLM's CPU attention takes (32). The vocabulary is that of the
tokenizer that is copied in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Wide enough that layers move the residual stream as much as the embedding
    # does, and that the first and second logit are never close.
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def kept_folder(name: str, tokenizer_from: Path, make: Callable[..., Path], **given: Any) -> Path:
    """Return what ``make`` writes, in a folder of the user's cache that stays from run to run.

    vLLM keeps what it has compiled by the path of the model. Another text of this file, another
    tokenizer or other arguments make another folder.
    """
    import transformers

    own = (Path(__file__).read_text(), tokenizer_from, given, transformers.__version__)
    cache = os.environ.get("NNSIGHT_PP_CACHE") or Path.home() / ".cache" / "nnsight_pp"
    digest = hashlib.sha256(repr(own).encode()).hexdigest()[:12]
    folder = Path(cache) / "tests" / f"{name}-{digest}"
    if not folder.is_dir():
        beside = folder.with_name(f"{folder.name}.{os.getpid()}")
        make(beside, tokenizer_from, **given)
        try:
            beside.rename(folder)
        except OSError:  # another run was quicker
            shutil.rmtree(beside)
    return folder


def tiny_llama(*, seed: int = 0, **changes: Any) -> Any:
    """Return a random two-layer Llama of this process, for a vocabulary of 32 ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **small, **changes})).float().eval()


def make_tiny_llama(folder: Path, tokenizer_from: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random Llama with its own output head; ``changes`` go into the config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {**SHAPE, "vocab_size": _vocab_size(tokenizer_from), "tie_word_embeddings": False}
    return _save(
        LlamaForCausalLM, LlamaConfig(**{**fields, **changes}), folder, tokenizer_from, seed
    )


def make_tiny_qwen2(folder: Path, tokenizer_from: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random Qwen2, whose output head is its embedding, with biases in attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {**SHAPE, "vocab_size": _vocab_size(tokenizer_from), "tie_word_embeddings": True}
    return _save(
        Qwen2ForCausalLM, Qwen2Config(**{**fields, **changes}), folder, tokenizer_from, seed
    )


# Two layers, so that each of two stages has one; what differs from the shape above, and what makes
# the family's own scales and caps matter.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            "tie_word_embeddings": False,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 64,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2", {}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
}

# Not one of the families above, whose standard names are known: its heads share keys and values.
# What vLLM's CPU kernel for latent attention takes; all layers feed forward.
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 64,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": False,
        },
    ),
}


def make_tiny(family: str, folder: Path, tokenizer_from: Path, *, seed: int = 0) -> Path:
    """Write a random model of one of `FAMILIES` or of `LATENT`, with two layers."""
    import transformers

    name, own = (FAMILIES | LATENT)[family]
    suffix = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    fields = {**SHAPE, "num_hidden_layers": 2, "vocab_size": _vocab_size(tokenizer_from), **own}
    config = getattr(transformers, f"{name}Config")(**fields)
    return _save(getattr(transformers, name + suffix), config, folder, tokenizer_from, seed)


def _vocab_size(tokenizer_from: Path) -> int:
    return json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]


def _save(model_class: Any, config: Any, folder: Path, tokenizer_from: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        # Hugging Face starts biases at zero and norms at one: a model that mixed
        # them up, or dropped one, would go unnoticed.
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
            elif "norm" in name or "ln_" in name:
                torch.nn.init.normal_(weight, mean=1.0, std=0.1)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder
