"""The model of the examples, on the engine that the command line names.

Every example has a `main(model)` that runs on either engine. What differs is how a length is
written, which the two functions at the top hide: transformers says `max_new_tokens`, vLLM says
`max_tokens`, and a vLLM `trace` generates where a local one runs one forward.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nnsight_pp


def is_vllm(model: Any) -> bool:
    return not isinstance(model, nnsight_pp.NNsight)


def once(model: Any) -> dict[str, Any]:
    """Return the options of a `trace` that runs the prompt through the model once."""
    return {"temperature": 0.0, "max_tokens": 1} if is_vllm(model) else {}


def greedy(model: Any, tokens: int) -> dict[str, Any]:
    """Return the options of a `trace` that generates this many of the likeliest tokens."""
    if is_vllm(model):
        return {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens}
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    return {"fn": "generate", "do_sample": False, **length}


def unembed(model: Any, stream: Any) -> Any:
    """Return the logits of a stream, by the model's own last norm and head. For use in a block."""
    normed = model.model.norm(stream)
    if is_vllm(model):
        return model.logits_processor(model.lm_head, normed)
    return model.lm_head(normed)


def token_id(model: Any, text: str) -> int:
    """Return the id of a text that is one token."""
    (one,) = model.tokenizer(text)["input_ids"]
    return one


def prepared_model() -> str:
    """Return the folder of SmolLM2-135M-Instruct, made now if it is not there (15 s)."""
    script = Path(__file__).parents[1] / "scripts" / "prepare_smollm2.py"
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


@contextlib.contextmanager
def opened(engine: str, path: str, stages: int = 2) -> Iterator[Any]:
    """Load the model, give it to the `with`, and end its processes behind it."""
    if engine == "local":
        yield nnsight_pp.LanguageModel(path, dtype="float32", dispatch=True)
        return
    with nnsight_pp.VLLM(
        path,
        pipeline_parallel_size=stages,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,  # starts sooner: every step here has a block
    ) as model:
        yield model


def run(main: Callable[..., None], about: str | None, *, draws: bool = False) -> None:
    """Load the model as the command line says, and call ``main`` with it."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages of the vllm engine")
    parser.add_argument("--model", help="a folder or repository; default: SmolLM2-135M-Instruct")
    if draws:
        parser.add_argument("--picture", default="", help="draw into this file")
    options = parser.parse_args()
    with opened(options.engine, options.model or prepared_model(), options.stages) as model:
        main(model, options.picture) if draws else main(model)
