"""Compile the sources in `csrc/` against the installed torch, once, and import it.

The extension must fit the torch and the interpreter that it meets, so it is compiled where it
runs: one g++ call, cached under a key of everything that matters. Any number of processes may ask
at once; a file lock lets one compile while the others wait, within a bound. A file that setup.py
built (`NNSIGHT_PP_PREBUILD=1`) lies in the package and is used when its key fits.

The cache is `$NNSIGHT_PP_CACHE`, or `~/.cache/nnsight_pp`; nothing in it is needed for long.

Not here: what the extension does (csrc/README.md) and who calls it (thread_state).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import greenlet
import torch

from nnsight_pp.errors import ExtensionBuildError, explain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_MODULE: Final = "nnsight_pp_thread_state"
_SOURCES: Final = (
    "thread_state.cpp", "lane.cpp", "near_ask.cpp", "near_visit.cpp", "serve_point.cpp",
    "stack.cpp", "bundle.hpp", "compat.hpp", "hidden_tls.hpp", "lane.hpp", "lane_types.hpp",
    "near.hpp", "plain_tensors.hpp", "serve_point.hpp", "slots.hpp", "stack.hpp",
)  # fmt: skip
_FLAGS: Final = ("-O3", "-fno-plt", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
_STRICT_FLAGS: Final = ("-Wall", "-Wextra", "-Werror")
_COMPILE_BOUND_S: Final = 300.0
_LOCK_BOUND_S: Final = 360.0
_NUM_MESSAGE_LINES: Final = 20


@functools.cache
def load_extension() -> ModuleType:
    """Import the compiled module, prebuilt or from the cache, building it if need be."""
    prebuilt = Path(__file__).parents[1] / _file_name()
    path = prebuilt if prebuilt.exists() else build(_cache_folder())
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    try:
        extension = importlib.util.module_from_spec(spec)
        loader.exec_module(extension)
    except ImportError as error:
        raise ExtensionBuildError(
            explain(
                "The compiled extension does not load.",
                why=f"{path}: {error}",
                todo=f"Remove {path} and start again; it is compiled anew.",
            )
        ) from error
    return extension


def plain_tensors() -> Any:
    """Return a new `PlainTensors` (csrc/plain_tensors.hpp), or None without the extension."""
    if os.environ.get("NNSIGHT_PP_TLS_SWAP") == "0":
        return None
    kind = getattr(load_extension(), "PlainTensors", None)  # a torch without c10d has none
    return None if kind is None else kind()


def build(folder: Path, *, strict: bool = False) -> Path:
    """Compile the extension into `folder`, unless it is there, and return its path.

    Safe to call from any number of processes at once: one compiles, the others wait.

    Args:
        folder: Made if it does not exist.
        strict: Treat warnings of the compiler as errors.

    Raises:
        ExtensionBuildError: There is no compiler, it failed, or another process held the lock
            for longer than a compilation can take.
    """
    path = folder / _file_name()
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not path.exists():
            _compile(path, strict=strict)
    return path


def _source_folder() -> Path:
    """Find csrc/: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / _SOURCES[0]).exists():
            return folder
    raise ExtensionBuildError(
        explain(
            "The sources of the extension are missing.",
            why=f"Neither {package / 'csrc'} nor {package.parent / 'csrc'} has {_SOURCES[0]}.",
            todo="Install nnsight_pp again.",
        )
    )


@functools.cache
def _file_name() -> str:
    """Name the compiled file after everything that makes it fit this interpreter and torch."""
    folder = _source_folder()
    parts = [(folder / name).read_text() for name in _SOURCES]
    parts += [torch.__version__, str(torch.version.git_version), platform.machine()]
    parts += [str(sysconfig.get_config_var("SOABI")), greenlet.__version__, *_flags()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"_thread_state_{key}.so"


def _cache_folder() -> Path:
    """Return the cache's subfolder for the compiler that this process would use."""
    root = os.environ.get("NNSIGHT_PP_CACHE")
    compiler = _compiler()
    version = ""
    if compiler is not None:
        asked = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False, timeout=60
        )
        version = asked.stdout.partition("\n")[0]
    key = hashlib.sha256(f"{compiler}\0{version}".encode()).hexdigest()[:8]
    parent = Path(root) if root else Path.home() / ".cache" / "nnsight_pp"
    return parent / f"thread_state-{key}"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _flags() -> list[str]:
    # Unannotated upstream.
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # pyright: ignore[reportAttributeAccessIssue]
    return [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def _compile(path: Path, *, strict: bool) -> None:
    compiler = _compiler()
    if compiler is None:
        raise ExtensionBuildError(
            explain(
                f"There is no C++ compiler ({os.environ.get('CXX', 'g++')}) on PATH.",
                why="The extension is compiled on first use.",
                todo="Install g++ (Debian, Ubuntu: `apt install g++`), or set NNSIGHT_PP_TLS_SWAP=0"
                " and do without parks inside torch calls.",
            )
        )
    # Slow to import (0.5 s), and needed only here.
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    includes = [
        *cpp_extension.include_paths(),
        str(Path(greenlet.__file__).parent),
        sysconfig.get_path("include"),
    ]
    flags = [
        *(compiler, *_flags(), *(_STRICT_FLAGS if strict else ())),
        # As system headers, so that their warnings are not ours.
        *(word for include in includes for word in ("-isystem", include)),
    ]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = [_source_folder() / name for name in _SOURCES if name.endswith(".cpp")]
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        # At once, the largest first: it takes more than half of the time.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [*flags, "-c", str(source), "-o", made]
                for source, made in zip(sources, objects, strict=True)
            ]
            for _ in pool.map(_run, sorted(commands, key=_size_of_source, reverse=True)):
                pass
        unfinished = f"{folder}/{path.name}"
        libraries += ["-ltorch_cpu", "-lc10", "-ldl"]
        _run([compiler, *_flags(), *objects, *libraries, "-o", unfinished])
        # Whole or not at all: a rank may look while this process writes.
        os.replace(unfinished, path)


def _size_of_source(command: list[str]) -> int:
    return Path(command[command.index("-c") + 1]).stat().st_size


def _run(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        ExtensionBuildError: It fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_BOUND_S
        )
    except subprocess.TimeoutExpired as error:
        raise ExtensionBuildError(
            explain(
                f"The compiler took longer than {_COMPILE_BOUND_S:.0f} s.",
                why="All of it takes about 10 s on two cores.",
                todo="Run it by hand to see why: " + " ".join(command),
            )
        ) from error
    if done.returncode != 0:
        raise ExtensionBuildError(_compiler_message(command, done.stderr))


def _compiler_message(command: list[str], output: str) -> str:
    lines = output.splitlines()
    # The first error is the one to read; what follows is mostly its echo.
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    shown = lines[first : first + _NUM_MESSAGE_LINES]
    if "Python.h" in output:
        todo = "Install Python's headers (Debian, Ubuntu: `apt install python3-dev`)."
    elif "unrecognized" in output and "-std=" in output:
        todo = "Install a g++ that knows C++20 (10 or newer), or name one in CXX."
    else:
        todo = (
            "Install a working g++ (`apt install g++ python3-dev`), or set NNSIGHT_PP_TLS_SWAP=0"
            " and do without parks inside torch calls."
        )
    # In the first part, which is not wrapped: the compiler's lines stay as they are.
    what = ["The extension could not be compiled.", "", " ".join(command), *shown, ""]
    return explain("\n".join(what), why="It is compiled on first use.", todo=todo)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock at `path`. The kernel drops it when its holder dies."""
    deadline = time.monotonic() + _LOCK_BOUND_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ExtensionBuildError(
                        explain(
                            f"Another process has held {path} for {_LOCK_BOUND_S:.0f} s.",
                            why="It compiles the extension, which takes about 10 s.",
                            todo=f"End that process (`fuser {path}` names it) and start again.",
                        )
                    ) from None
                time.sleep(0.05)
        yield
