"""Random LoRA adapters, and what a model is with one in its weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

RANK = 4


def plain_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def with_random_adapter(
    plain: Any, folder: Path, targets: Mapping[str, str], *, alpha: int, seed: int
) -> Any:
    """Write an adapter into ``folder``; return a copy of ``plain`` with it in its weights.

    Args:
        plain: A Llama model of Hugging Face.
        folder: Is there already.
        targets: The module that holds each linear layer of the adapter, by the layer's name.
        alpha: The adapter's own; what it adds is ``alpha / RANK`` times its product.
        seed: Of its numbers.
    """
    merged = copy.deepcopy(plain)
    weights: dict[str, torch.Tensor] = {}
    random = torch.Generator().manual_seed(seed)
    for index, layer in enumerate(merged.model.layers):
        for name, parent in targets.items():
            whole = getattr(getattr(layer, parent), name).weight
            first = torch.randn(RANK, whole.shape[1], generator=random) * 0.1
            second = torch.randn(whole.shape[0], RANK, generator=random) * 0.1
            path = f"base_model.model.model.layers.{index}.{parent}.{name}"
            weights[f"{path}.lora_A.weight"], weights[f"{path}.lora_B.weight"] = first, second
            with torch.no_grad():
                whole += alpha / RANK * second @ first
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
