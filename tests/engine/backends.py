"""The backends that one block runs on, behind one face.

A block of `blocks.py` is written once. What differs between Hugging Face's and vLLM's modules (a
layer's output, the last position's logits) stands in the functions below, which travel with the
block as the user's own code does.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight_pp import VLLM, NNsight

PROMPT = "The Eiffel Tower is located in the city of"
LONGER = (
    "My favourite thing about the old town is that every small street leads down to the sea and"
)
SHORT = "Two plus two is"
# What a rank counts of requests, workers and values: zero when nobody runs.
GAUGES = (
    "tracked",
    "requests",
    "workers",
    "parked",
    "published",
    "shelves",
    "waiting",
    "pending",
    "parcels",
    "observed",
    "resident",
)


def local_stream(layer: Any) -> Any:
    return layer.output[0]


def local_add(layer: Any, vector: Any) -> None:
    layer.output[:] += vector


def local_rows(value: Any) -> Any:
    return value[0]


def local_mlp(layer: Any) -> Any:
    return layer.mlp.output[0]


def local_set_mlp(layer: Any, value: Any) -> None:
    layer.mlp.output = value[None]


def local_mlp_input(layer: Any) -> Any:
    return layer.mlp.input[0]


def local_set_mlp_input(layer: Any, value: Any) -> None:
    layer.mlp.input = value[None]


def local_skip_layer(layer: Any) -> None:
    layer.skip(layer.input)


def local_skip_mlp(layer: Any, value: Any) -> None:
    layer.mlp.skip(value[None])


def local_logits(model: Any) -> Any:
    return model.lm_head.output[0, -1:]


def local_lens(model: Any, stream: Any) -> Any:
    return model.lm_head(model.model.norm(stream))


def vllm_lens(model: Any, stream: Any) -> Any:
    return model.logits_processor(model.lm_head, model.model.norm(stream))


def vllm_stream(layer: Any) -> Any:
    out = layer.output
    return out[0] + out[1]


def vllm_add(layer: Any, vector: Any) -> None:
    layer.output[0][:] += vector


def vllm_rows(value: Any) -> Any:
    return value


def vllm_mlp(layer: Any) -> Any:
    return layer.mlp.output


def vllm_set_mlp(layer: Any, value: Any) -> None:
    layer.mlp.output = value


def vllm_mlp_input(layer: Any) -> Any:
    return layer.mlp.input


def vllm_set_mlp_input(layer: Any, value: Any) -> None:
    layer.mlp.input = value


def vllm_skip_layer(layer: Any) -> None:
    _, hidden, residual = layer.inputs[0]
    layer.skip((hidden, residual))


def vllm_skip_mlp(layer: Any, value: Any) -> None:
    layer.mlp.skip(value)


def vllm_logits(model: Any) -> Any:
    return model.logits


LOCAL_OPS = SimpleNamespace(
    stream=local_stream,
    add=local_add,
    mlp=local_mlp,
    rows=local_rows,
    set_mlp=local_set_mlp,
    mlp_input=local_mlp_input,
    set_mlp_input=local_set_mlp_input,
    skip_layer=local_skip_layer,
    skip_mlp=local_skip_mlp,
    logits=local_logits,
    lens=local_lens,
)
VLLM_OPS = SimpleNamespace(
    stream=vllm_stream,
    add=vllm_add,
    mlp=vllm_mlp,
    rows=vllm_rows,
    set_mlp=vllm_set_mlp,
    mlp_input=vllm_mlp_input,
    set_mlp_input=vllm_set_mlp_input,
    skip_layer=vllm_skip_layer,
    skip_mlp=vllm_skip_mlp,
    logits=vllm_logits,
    lens=vllm_lens,
)


class Local:
    """The Hugging Face model in this process: the reference."""

    name = "local"
    ops = LOCAL_OPS

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        module.generation_config.do_sample = False
        module.generation_config.pad_token_id = module.config.eos_token_id
        self.model = NNsight(module.eval())
        self.layers = list(self.model.model.layers)

    def trace(self, prompt: str, steps: int = 1, stop_at: int | None = None) -> Any:
        encoded = self.tokenizer(prompt, return_tensors="pt")
        options = {} if stop_at is None else {"eos_token_id": stop_at}
        return self.model.trace(
            encoded.input_ids,
            attention_mask=encoded.attention_mask,
            fn="generate",
            max_new_tokens=steps,
            **options,
        )

    def context(self) -> Any:
        return torch.no_grad()

    def assert_idle(self) -> None:
        """Nothing outlives a run in this process."""

    def close(self) -> None:
        """Nothing to end."""


class Engine:
    """The same model on a vLLM engine."""

    ops = VLLM_OPS

    def __init__(
        self,
        path: str,
        stages: int,
        *,
        tp: int = 1,
        in_process: bool = False,
        enforce_eager: bool = True,
        **options: Any,
    ) -> None:
        """Start an engine; ``in_process`` schedules here, so that batches are alike each time."""
        self.name = f"vllm-{stages}" if tp == 1 else f"vllm-{stages}-tp{tp}"
        self.model = VLLM(
            path,
            pipeline_parallel_size=stages,
            tensor_parallel_size=tp,
            dtype="float32",
            enforce_eager=enforce_eager,
            max_model_len=256,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=256 << 20,
            **options,
        )
        with pytest.MonkeyPatch.context() as patch:
            if in_process:
                patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            self.model.dispatch()
        self.tokenizer = self.model.tokenizer
        self.layers = list(self.model.model.layers)

    def trace(self, prompt: str, steps: int = 1, stop_at: int | None = None) -> Any:
        stop = {} if stop_at is None else {"stop_token_ids": [stop_at]}
        return self.model.trace(prompt, temperature=0.0, max_tokens=steps, **stop)

    def context(self) -> Any:
        return contextlib.nullcontext()

    def neighbours(self) -> Any:
        """Return the seven requests that can run beside others, after running each alone."""
        from engine.neighbours import Neighbours

        return Neighbours(self)

    def assert_idle(self) -> None:
        """Fail where a rank has kept anything of a request that is over."""
        for rank in self.model.statistics():
            assert {name: rank[name] for name in GAUGES if rank.get(name)} == {}

    def close(self) -> None:
        self.model.close()
