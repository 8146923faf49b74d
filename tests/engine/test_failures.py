"""A rank that dies ends the engine with words, and the next run starts a new one."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest

from nnsight_pp import VLLM, EngineDiedError


def test_a_killed_rank_is_an_error_and_not_a_hang(
    tiny_llama_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = VLLM(
        str(tiny_llama_path),
        pipeline_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
    )
    layers = list(model.model.layers)
    try:
        with model.trace("one two three", temperature=0.0, max_tokens=2):
            before = layers[3].mlp.output.save()
        pids = [pickle.loads(answer)[1] for answer in model._call("nnsight_describe")]
        os.kill(pids[0], signal.SIGUSR1)  # prints where it stands, and goes on
        with model.trace("one two three", temperature=0.0, max_tokens=2):
            again = layers[3].mlp.output.save()
        assert again.equal(before)
        printed = capfd.readouterr().err
        assert "most recent call first" in printed
        assert "nnsight_pp workers on stage 0 of 2" in printed
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDiedError, match="died"):
            with model.trace("one two three", temperature=0.0, max_tokens=2):
                late = layers[3].mlp.output.save()
        assert time.monotonic() - started < 60
        model.close()
        with model.trace("one two three", temperature=0.0, max_tokens=2):
            after = layers[3].mlp.output.save()
        assert after.equal(before)
        assert model.request_counts() == [0, 0]
    finally:
        model.close()
