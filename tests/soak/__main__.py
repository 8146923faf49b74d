"""Run many requests of mixed kinds on two stages, and say what grew: `make soak`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fakes.models import make_tiny_llama
from nnsight_pp import VLLM
from soak.kinds import KINDS
from soak.runs import MOST_GROWTH, Soak, wanted_from

ROOT = Path(__file__).resolve().parents[2]


def tiny(folder: str) -> str:
    """Return a new random Llama with SmolLM2's tokenizer."""
    given = os.environ.get("NNSIGHT_PP_TEST_MODEL")
    if not given:
        script = ROOT / "scripts" / "prepare_smollm2.py"
        made = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True)
        given = made.stdout.strip().splitlines()[-1]
    return str(make_tiny_llama(Path(folder) / "tiny-llama", Path(given)))


def engine(path: str, stages: int) -> VLLM:
    return VLLM(
        path,
        pipeline_parallel_size=stages,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="", help=f"of {', '.join(KINDS)}")
    given = parser.parse_args()
    for name in [one for one in KINDS if given.kinds and one not in given.kinds.split(",")]:
        del KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny(folder)
        with engine(path, 1) as one:
            one.dispatch()
            wanted = wanted_from(one)
        with engine(path, 2) as two:
            two.dispatch()
            soak = Soak(two, wanted, given.seed)
            began = time.monotonic()
            soak.run(given.requests, look_every=max(given.requests // 40, 1))
            seconds = time.monotonic() - began
    print(f"{soak.counts.total()} runs in {seconds:.0f} s: {dict(soak.counts)}")
    has_grown = False
    for name, looks in soak.looks.items():
        for look in looks[:: max(len(looks) // 10, 1)]:
            print(f"  {name}: {look}")
    for name, (share, fds, threads) in soak.growths().items():
        print(f"{name}: memory {share:+.1%}, files {fds:+d}, threads {threads:+d}")
        has_grown |= share > MOST_GROWTH or fds > 0 or threads > 0
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())
