"""From what a user gives a trace to what vLLM takes: one prompt and its sampling parameters."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams

from nnsight_pp.engines.vllm.compat import COMPANY, PAYLOAD
from nnsight_pp.errors import ConfigurationError, explain

_USUAL = SamplingParams()
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def prompt_of(inputs: tuple[Any, ...], salt: str) -> dict[str, Any]:
    """Return the one prompt of an invoke as vLLM takes it.

    A salt of its own keeps the request's KV blocks out of the prefix cache that others share: a
    block that edits activations must not leave edited keys and values under a plain prompt's hash.

    Raises:
        ConfigurationError: There is no prompt, or more than one.
    """
    if len(inputs) != 1:
        raise ConfigurationError(
            explain(
                f"{len(inputs)} inputs were given where one prompt is taken."
                if inputs
                else "An invoke with code has no prompt.",
                why="On a vLLM engine each invoke is one request with one prompt.",
                todo="Use one `tracer.invoke(prompt)` for each prompt.",
            )
        )
    prompt = inputs[0]
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigurationError("The prompt is empty.")
        return {"prompt": prompt, "cache_salt": salt}
    if isinstance(prompt, dict) and ("prompt" in prompt or "prompt_token_ids" in prompt):
        return {**prompt, "cache_salt": salt}
    return {"prompt_token_ids": _ids(prompt), "cache_salt": salt}


def _ids(prompt: Any) -> list[int]:
    ids = prompt
    if hasattr(prompt, "keys") and "input_ids" in prompt:
        ids = prompt["input_ids"]
        mask = prompt.get("attention_mask")
        if isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor):
            ids = ids.reshape(-1)[mask.reshape(-1).bool()] if ids.numel() == mask.numel() else ids
    if isinstance(ids, torch.Tensor):
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        ids = ids.tolist()
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not isinstance(ids, (list, tuple)) or not all(type(item) is int for item in ids):
        raise ConfigurationError(
            explain(
                f"A {type(prompt).__name__} is not one prompt.",
                why="A prompt is a string, a list of token ids, a tokenizer's output for one "
                "text, or a vLLM prompt.",
                todo="Use one `tracer.invoke(prompt)` for each prompt.",
            )
        )
    if not ids:
        raise ConfigurationError("The prompt is empty.")
    return list(ids)


def most_tokens(options: dict[str, Any]) -> int | None:
    """Return how many tokens ``options`` ask for at most; None where nothing but their end does."""
    for name in ("max_tokens", "max_new_tokens"):
        if name in options:
            return options[name]
    return _USUAL.max_tokens


def sampling_params(
    options: dict[str, Any], payload: bytes | None, company: str | None = None
) -> SamplingParams:
    """Return vLLM's parameters for ``options``, with a block's bytes on board.

    Args:
        options: The parameters by name.
        payload: The block.
        company: Names those that must run in the same steps.

    Raises:
        TypeError: An option that vLLM does not know; the message names it.
    """
    known = {_RENAMED.get(name, name): value for name, value in options.items()}
    unknown = sorted(set(known) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise TypeError(f"vLLM's SamplingParams have no {', '.join(map(repr, unknown))}")
    if payload is not None:
        if known.get("n", 1) != 1:
            # The sequences share the salt, and each block must see the whole prompt.
            known["skip_reading_prefix_cache"] = True
        # Bytes only: anything else in here kills the engine or arrives as something else.
        own = {PAYLOAD: payload} if company is None else {PAYLOAD: payload, COMPANY: company}
        known["extra_args"] = {**(known.get("extra_args") or {}), **own}
    return SamplingParams(**known)
