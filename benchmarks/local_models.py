"""What the local rows run on: modules that compute nothing, and two models that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_env import cache_root

PROMPT = "The Eiffel Tower is located in the city of"
SMOLLM2 = cache_root() / "models" / "SmolLM2-135M-Instruct-fp32"


class Pass(torch.nn.Module):
    """Returns what it is given, so that a call of it is the cost of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Chain(torch.nn.Module):
    """A model of ``count`` layers, all `Pass`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Pass() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def random_gpt2() -> tuple[Any, Any, torch.Tensor]:
    """Return a GPT-2 of 12 layers that is 64 wide, a tokenizer of few words, and a prompt."""
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_head=4, n_layer=12, vocab_size=512, n_positions=256)
    model = GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[PAD]"
    )
    return model, tokenizer, torch.arange(8)[None]


def smollm2(folder: Path = SMOLLM2) -> tuple[Any, Any, torch.Tensor]:
    """Return SmolLM2-135M-Instruct as `scripts/prepare_smollm2.py` leaves it, and a prompt.

    Raises:
        OSError: It is not prepared.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not folder.is_dir():
        raise OSError(f"{folder} is not there: run `make model`")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, tokenizer(PROMPT, return_tensors="pt").input_ids


def middle_layer(model: Any) -> Any:
    """Return the layer that a generation reads, of a model or of what stands for it."""
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return layers[6]


_FUNCTION = """
def {name}(model, x):
    with model.trace(x):
        first = model.layers[0].output
        scaled = [first * number for number in range(3)]
        if len(scaled) > 2:
            model.layers[1].output = first + 0 * scaled[2]
        norm = model.layers[2].output.norm(dim=-1)
        last = model.layers[3].output.save()
    return last
"""


def write_cold_files(folder: Path, count: int) -> None:
    """Write files that nobody has read yet, each of 30 functions with one block, 350 lines."""
    names = ["zeroth", "first", *(f"other_{number}" for number in range(28))]
    text = "".join(_FUNCTION.format(name=name) for name in names)
    for kind in ("first", "next"):
        for number in range(count):
            (folder / f"{kind}_{number:03}.py").write_text(text)
