"""The models and the backends of the suites that run workloads."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.local_models import SMOLLM2
from benchmarks.peer_env import cache_root

# Seven tokens each for the tokenizer of SmolLM2, with last tokens that differ.
CLEAN = "The Eiffel Tower is in Paris"
OTHER = "My old brown dog is called Max"
THIRD = "Two big red cars stand over there"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Backend(NamedTuple):
    """Where a block runs: on this process where it has no stages, else on an engine's ranks."""

    title: str
    stages: int = 0
    tp: int = 1


BACKENDS = {
    "rank": Backend("1 rank", 1),
    "local": Backend("local Hugging Face"),
    "stages2": Backend("2 stages", 2),
    "stages3": Backend("3 stages", 3),
    "tp2": Backend("tp 2", 1, 2),
    "tp3": Backend("tp 3", 1, 3),
}
REFERENCE = "rank"


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, made now if it is not there (15 s)."""
    if not SMOLLM2.is_dir():
        script = Path(__file__).parents[1] / "scripts" / "prepare_smollm2.py"
        subprocess.run([sys.executable, script], stdout=subprocess.DEVNULL, check=True)
    return SMOLLM2


def tiny_folder() -> Path:
    """Return the folder of a random Llama of six layers and four heads, with a real tokenizer.

    Its weights are wide: the two best logits of a position are never close.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    source = smollm2_folder()
    folder = cache_root() / "models" / "benchmarks-llama-6-layers"
    if (folder / "config.json").exists():
        return folder
    words = json.loads((source / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, vocab_size=words, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float().eval()
    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    model.save_pretrained(made)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, made)
    made.rename(folder)
    return folder


MODELS = {"tiny": tiny_folder, "smollm2": smollm2_folder}


@contextlib.contextmanager
def opened(backend: Backend, folder: Path, **arguments: Any) -> Iterator[Any]:
    """Give the model on ``backend`` to the `with`, and end its processes behind it."""
    import nnsight_pp

    if not backend.stages:
        yield nnsight_pp.LanguageModel(str(folder), dtype="float32", dispatch=True)
        return
    with nnsight_pp.VLLM(
        str(folder),
        pipeline_parallel_size=backend.stages,
        tensor_parallel_size=backend.tp,
        dtype="float32",
        **{
            "max_model_len": 256,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 << 20,
            **arguments,
        },
    ) as model:
        model.dispatch()
        yield model
