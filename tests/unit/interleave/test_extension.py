"""The extension is compiled once, whole or not at all, and a failure says what to install."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from nnsight_pp.errors import ExtensionBuildError
from nnsight_pp.interleave import extension


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a shell script in the place of g++; `$OUT` is the file that it should write."""
    # The real one takes 0.5 s to import, and only tells where headers are.
    found = types.SimpleNamespace(include_paths=lambda: ["inc"], library_paths=lambda: ["lib"])
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", found)

    def install(script: str) -> Path:
        path = tmp_path / "c++"
        prelude = 'while [ "$1" != -o ]; do shift; done; OUT=$2\n'
        path.write_text(f"#!/bin/sh\n{prelude}{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return tmp_path / "cache"

    return install


def test_eight_ranks_compile_once(compiler: Callable[[str], Path], tmp_path: Path) -> None:
    folder = compiler(f'echo run >> {tmp_path}/log; sleep 0.1; echo built > "$OUT"')
    paths: list[Path] = []
    ranks = [
        threading.Thread(target=lambda: paths.append(extension.build(folder))) for _ in range(8)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    num_sources = sum(name.endswith(".cpp") for name in extension._SOURCES)
    assert (tmp_path / "log").read_text() == "run\n" * (num_sources + 1)  # and one to link them
    assert len(set(paths)) == 1
    assert len(paths) == 8
    assert paths[0].read_text() == "built\n"
    assert sorted(path.name for path in folder.iterdir()) == [paths[0].name, "lock"]


def test_failed_build_shows_the_compilers_words(compiler: Callable[[str], Path]) -> None:
    folder = compiler('echo "x.cpp:3:9: error: no such thing" >&2; echo half > "$OUT"; exit 1')
    with pytest.raises(ExtensionBuildError) as raised:
        extension.build(folder)
    assert "x.cpp:3:9: error: no such thing" in str(raised.value)
    assert "apt install g++" in str(raised.value)
    # Nothing half-written is left for the next process to load.
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_failed_build_names_the_headers_of_python(compiler: Callable[[str], Path]) -> None:
    folder = compiler('echo "fatal error: Python.h: No such file or directory" >&2; exit 1')
    with pytest.raises(ExtensionBuildError, match="python3-dev"):
        extension.build(folder)


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExtensionBuildError, match=r"no-such-compiler.*on PATH"):
        extension.build(tmp_path)


def test_held_lock_is_waited_for_within_a_bound(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiler('echo built > "$OUT"')
    monkeypatch.setattr(extension, "_LOCK_BOUND_S", 0.1)
    folder.mkdir()
    with (
        extension._locked(folder / "lock"),
        pytest.raises(ExtensionBuildError, match="Another process"),
    ):
        extension.build(folder)
    assert extension.build(folder).exists()
