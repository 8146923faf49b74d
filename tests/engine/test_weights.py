"""Weights edited between the runs of an engine, against the same edits of a model in this process.

The engines hold a random Qwen2 (fused layers, biases, a head that is the embedding): on one rank,
with and without compiling, and on two stages of two ranks each. Each edit is written for both:
`E` is the engine's model, `H` Hugging Face's; `Q`, `K` and `W` are the numbers of query, of key and
of feed-forward columns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.backends import PROMPT, SHORT, Engine
from engine.compare import assert_logits_as, logits_of
from nnsight_pp import VLLM, NotSupportedError

if TYPE_CHECKING:
    from engine.kept_engine import KeptEngine

Q, K, W = 128, 64, 256
# By its name: the edit of the engine, and of a model in this process.
EDITS = {
    "a column of a row-parallel layer": (
        "E.layers[2].mlp.down_proj.weight[:, 5] = 0",
        "H.layers[2].mlp.down_proj.weight[:, 5] = 0",
    ),
    "query rows of a fused layer": (
        "E.layers[0].self_attn.qkv_proj.weight[60:70] *= 2",
        "H.layers[0].self_attn.q_proj.weight[60:70] *= 2",
    ),
    "a key row of a fused layer": (
        "E.layers[1].self_attn.qkv_proj.weight[Q + 40] = 0.3",
        "H.layers[1].self_attn.k_proj.weight[40] = 0.3",
    ),
    "value rows of a fused layer": (
        "E.layers[3].self_attn.qkv_proj.weight[Q + K + 20 :].add_(0.05)",
        "H.layers[3].self_attn.v_proj.weight[20:].add_(0.05)",
    ),
    "a bias of a fused layer": (
        "E.layers[1].self_attn.qkv_proj.bias[Q + K :] += ramp",
        "H.layers[1].self_attn.v_proj.bias += ramp",
    ),
    "an up row of a fused layer": (
        "E.layers[0].mlp.gate_up_proj.weight[W + 130].zero_()",
        "H.layers[0].mlp.up_proj.weight[130].zero_()",
    ),
    "through views": (
        "E.layers[3].self_attn.o_proj.weight.detach().T.view(4, 32, -1)[1, 3:5].fill_(0.2)",
        "H.layers[3].self_attn.o_proj.weight.detach().T.view(4, 32, -1)[1, 3:5].fill_(0.2)",
    ),
    "rows of a tied embedding": (
        "E.embed_tokens.weight[ids] = rows",
        "H.embed_tokens.weight[ids] = rows",
    ),
    "a whole norm": (
        "E.layers[2].input_layernorm.weight *= 1.5",
        "H.layers[2].input_layernorm.weight *= 1.5",
    ),
    "another value for the data": (
        "E.norm.weight.data = E.norm.weight + norm",
        "H.norm.weight.data = H.norm.weight + norm",
    ),
    "a function of torch": (
        "torch.clamp(E.layers[1].mlp.down_proj.weight, -0.1, 0.1, "
        "out=E.layers[1].mlp.down_proj.weight)",
        "H.layers[1].mlp.down_proj.weight.clamp_(-0.1, 0.1)",
    ),
    "a function that edits what it is given by name": (
        "torch.nn.init.constant_(tensor=E.norm.weight, val=1.2)",
        "torch.nn.init.constant_(tensor=H.norm.weight, val=1.2)",
    ),
    "numbers drawn here": (
        "torch.manual_seed(5); torch.nn.init.normal_(E.layers[2].self_attn.o_proj.weight, 0, 0.1)",
        "torch.manual_seed(5); torch.nn.init.normal_(H.layers[2].self_attn.o_proj.weight, 0, 0.1)",
    ),
}
NAMES: dict[str, Any] = {
    "Q": Q,
    "K": K,
    "W": W,
    "torch": torch,
    "ramp": torch.linspace(-0.5, 0.5, K),
    "norm": torch.linspace(-0.2, 0.4, 128),
    "ids": torch.tensor([260, 7042, 49000]),
    "rows": torch.linspace(-0.3, 0.3, 3 * 128).view(3, 128),
}
# Stages, ranks of each, and whether the engine does not compile.
SHAPES: dict[str, dict[str, Any]] = {
    "two stages of two ranks": {"stages": 2, "tp": 2},
    "one rank": {"stages": 1, "in_process": True},
    "one rank, compiled": {"stages": 1, "enforce_eager": False},
}


@pytest.fixture(scope="module", params=SHAPES)
def engine(
    request: pytest.FixtureRequest, tiny_qwen2_path: Path, kept_engine: KeptEngine
) -> Iterator[Engine]:
    shape = SHAPES[request.param]
    with kept_engine.lent(tiny_qwen2_path, **shape, is_spoiled=True) as engine:
        yield engine


@pytest.fixture
def hub(tiny_qwen2_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2_path, dtype=torch.float32).eval()
    return model.requires_grad_(False)


def test_every_edit_lands_as_in_this_process(engine: Engine, hub: Any) -> None:
    before = assert_logits_as(hub, engine, PROMPT)
    for name, (there, here) in EDITS.items():
        exec(there, {**NAMES, "E": engine.model.model})
        exec(here, {**NAMES, "H": hub.model})
        after = assert_logits_as(hub, engine, PROMPT)
        assert not torch.allclose(before, after, atol=1e-4), name
        before = after
    assert_reads_as(hub, engine)
    assert_refusals(engine)
    assert_logits_as(hub, engine, SHORT)
    engine.assert_idle()


def assert_reads_as(hub: Any, engine: Engine) -> None:
    """Weights are read whole, in the order of the layers that are not split."""
    there, here = engine.model.model, hub.model
    attn, fused = here.layers[1].self_attn, there.layers[1].self_attn.qkv_proj
    wanted = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
    assert torch.equal(fused.weight.clone(), wanted)
    assert torch.equal(fused.weight[130:140, 3] + 0, wanted[130:140, 3])
    assert torch.equal(
        there.embed_tokens.weight[NAMES["ids"]], here.embed_tokens.weight[NAMES["ids"]]
    )
    down, own = there.layers[3].mlp.down_proj.weight, here.layers[3].mlp.down_proj.weight
    assert down.shape == own.shape
    assert isinstance(down, torch.nn.Parameter)
    assert float(down.norm()) == float(own.norm())
    assert np.array_equal(np.asarray(down), own.numpy())
    named = dict(there.layers[3].named_parameters())
    assert torch.equal(named["mlp.down_proj.weight"] * 1, own)


def assert_refusals(engine: Engine) -> None:
    """What cannot be done is refused at its line, and changes nothing."""
    model = engine.model
    down = model.model.layers[2].mlp.down_proj
    before = logits_of(engine, PROMPT)
    with pytest.raises(IndexError):
        down.weight[:, 4000] = 1
    with pytest.raises(RuntimeError, match="must match the size"):
        down.weight.copy_(torch.ones(3, 5))
    with pytest.raises(NotSupportedError, match="shape or dtype"):
        down.weight.resize_(2, 2)
    with pytest.raises(NotSupportedError, match="was assigned"):
        down.weight = torch.zeros(128, 256)
    with pytest.raises(NotSupportedError, match="state_dict was asked for"):
        down.state_dict()
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(down.weight)[0] = 1
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        torch.atleast_2d(down.weight)[0, 0] = 1
    taken: Any = down.weight
    with (
        pytest.raises(NotSupportedError, match="taken outside of it"),
        model.trace(PROMPT, max_tokens=1),
    ):
        size = taken.norm().save()
    with (
        pytest.raises(NotSupportedError, match="between the traces"),
        model.trace(PROMPT, max_tokens=1),
    ):
        model.model.norm.weight[0] = 1
    with (
        pytest.raises(NotSupportedError, match="was asked for"),
        model.trace(PROMPT, max_tokens=1),
    ):
        next(iter(model.model.norm.parameters())).zero_()
    assert torch.equal(logits_of(engine, PROMPT), before)


@pytest.fixture(scope="module")
def lone(tiny_qwen2_path: Path) -> Iterator[Engine]:
    with contextlib.closing(Engine(str(tiny_qwen2_path), 1, in_process=True)) as engine:
        yield engine


def test_an_edit_while_a_request_runs_is_refused(lone: Engine, hub: Any) -> None:
    weight = lone.model.model.norm.weight
    llm = lone.model._llm
    assert llm is not None
    llm.enqueue([SHORT], use_tqdm=False)
    with pytest.raises(NotSupportedError, match="while a request was running"):
        weight.mul_(2)
    llm.wait_for_completion(use_tqdm=False)
    caught: list[BaseException] = []
    with lone.model._lock:  # as another thread's run holds it

        def edit() -> None:
            try:
                weight.mul_(2)
            except NotSupportedError as error:
                caught.append(error)

        thread = threading.Thread(target=edit)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert_logits_as(hub, lone, PROMPT)


def test_prompts_are_computed_again_after_an_edit(lone: Engine, hub: Any) -> None:
    long = " ".join([PROMPT] * 8)
    assert_logits_as(hub, lone, long)
    lone.model.model.layers[0].mlp.down_proj.weight[3] = 0.5
    hub.model.layers[0].mlp.down_proj.weight[3] = 0.5
    assert_logits_as(hub, lone, long)


def test_the_next_start_has_the_weights_of_the_checkpoint(lone: Engine, hub: Any) -> None:
    lone.model.model.norm.weight.zero_()
    assert not bool(logits_of(lone, PROMPT).any())
    lone.model.close()
    assert_logits_as(hub, lone, PROMPT)


# What would change the client's tree, and nothing that runs.
CHANGES = {
    "to": "E.to(torch.float16)",
    "to of a part": "E.layers[0].mlp.to('cpu')",
    "cpu": "E.cpu()",
    "cuda": "E.cuda()",
    "half": "E.half()",
    "float": "E.layers[0].float()",
    "train": "E.train()",
    "load_state_dict": "E.load_state_dict({})",
    "requires_grad_": "E.requires_grad_(False)",
    "register_forward_hook": "E.layers[0].register_forward_hook(print)",
    "layers.append": "E.layers.append(torch.nn.Identity())",
    "layers.0.mlp was set": "E.layers[0].mlp = torch.nn.Identity()",
    "adapter was set": "E.layers[0].adapter = torch.nn.Identity()",
    "eps was set": "E.norm.variance_epsilon = 0.1",
    "was assigned": "E.norm.weight = torch.nn.Parameter(torch.ones(128))",
}


@pytest.fixture(scope="module")
def unstarted(tiny_qwen2_path: Path) -> Any:
    return VLLM(str(tiny_qwen2_path), dtype="float32").model


@pytest.mark.parametrize("words", CHANGES)
def test_what_would_change_the_tree_alone_is_refused(words: str, unstarted: Any) -> None:
    with pytest.raises(NotSupportedError) as error:
        exec(CHANGES[words], {"E": unstarted, "torch": torch})
    assert words.split(" of ")[0].replace("eps", "variance_epsilon") in str(error.value)


def test_a_tree_is_in_the_mode_of_inference(unstarted: Any) -> None:
    assert unstarted.layers[0].eval() is unstarted.layers[0]
    assert unstarted.train(False) is unstarted
    unstarted.layers[0].note = "mine"
    assert unstarted.layers[0].note == "mine"
