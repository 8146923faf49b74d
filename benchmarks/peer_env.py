"""Other libraries in virtual environments of their own, made once in the user's cache.

A peer shares torch, transformers and all else with the environment that runs the benchmark (its
packages are on the peer's path, behind the peer's own), so both are timed on the same torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

NNSIGHT = "nnsight==0.8.1"
LENS = "vllm-lens==1.3.0"


class PeerMissingError(Exception):
    """A peer could not be installed; the text says why."""


def cache_root() -> Path:
    """Return the folder under which all prepared things live."""
    chosen = os.environ.get("NNSIGHT_PP_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nnsight_pp"


def peer_python(requirement: str, *, alone: bool = False) -> Path:
    """Return an interpreter that has ``requirement``, installing it if it is not there yet.

    With ``alone`` nothing comes along that it asks for: a plugin of vLLM would bring another vLLM.

    Raises:
        PeerMissingError: pip could not install it.

    Cost: seconds once, then nothing.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"{requirement.replace('==', '-')}-python{version}"
    folder = cache_root() / "peers" / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    own = sysconfig.get_path("purelib")
    if ready.exists() and ready.read_text() == own:
        return python
    print(f"installing {requirement} into {folder}", file=sys.stderr, flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    packages = folder / "lib" / f"python{version}" / "site-packages"
    (packages / "shared.pth").write_text(own + "\n")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, *(["--no-deps"] if alone else []), requirement)
    _run(str(python), "-c", f"import {requirement.partition('==')[0].replace('-', '_')}")
    ready.write_text(own)
    return python


def _run(*command: str) -> None:
    # A checkout on the path would stand before what is installed.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissingError(str(error)) from error
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise PeerMissingError(f"`{' '.join(command)}` failed:\n{last}")
