"""Methods of torch's modules that change the module that they are called on, by name.

Where a tree does not mirror the module that runs, a change of the mirrored one would be lost: a
root asks for them here.
"""

from __future__ import annotations

from typing import Any

# Where its weights are, and what they are.
_OF_WEIGHTS = frozenset(
    [
        *("to", "cpu", "cuda", "xpu", "mtia", "ipu", "to_empty", "share_memory"),
        *("half", "float", "double", "bfloat16", "type", "apply", "requires_grad_", "zero_grad"),
        *("load_state_dict", "register_parameter", "register_buffer", "load_weights"),
        *("resize_token_embeddings", "tie_weights", "set_input_embeddings"),
        *("set_output_embeddings", "load_adapter", "merge_and_unload", "init_weights"),
    ]
)
# What it does.
_OF_FORWARD = frozenset(
    [
        *("train", "compile", "add_module", "register_module", "set_submodule"),
        *("register_forward_hook", "register_forward_pre_hook", "register_backward_hook"),
        *("register_full_backward_hook", "register_full_backward_pre_hook"),
        *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
        *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
        *("append", "extend", "insert", "pop", "clear", "update"),
    ]
)
CHANGING = _OF_WEIGHTS | _OF_FORWARD


def is_changing(module: Any, name: str, value: Any) -> bool:
    """Whether ``value`` is the method ``name`` of ``module``, and one that changes it."""
    return name in CHANGING and getattr(value, "__self__", None) is module


def instead_of(name: str) -> str:
    """Return what to do on an engine where the method ``name`` would do it in this process."""
    if name in ("to", "half", "float", "double", "bfloat16", "type"):
        return 'Choose the dtype when it is built: `VLLM(..., dtype="float16")`.'
    if name in ("cpu", "cuda", "xpu", "mtia", "ipu", "to_empty"):
        return "vLLM places the model: build it on the machine where it shall run."
    if name in ("train", "compile"):
        return "Leave it out: an engine only infers, and compiles what it runs by itself."
    if name in ("zero_grad", "requires_grad_"):
        return "Leave it out: an engine computes no gradients. `LanguageModel` does."
    if name.startswith("register_") and name.endswith("_hook"):
        return "Read or edit `.input` and `.output` in a block; `model.edit(...)` stores one."
    if name in _OF_WEIGHTS:
        return "Edit weights in place between the traces, such as `layer.weight[:] = value`."
    return "Replace what the module takes or gives in a block: `.input`, `.output`, `.skip(value)`."
