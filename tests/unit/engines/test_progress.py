"""What a terminal shows while the user waits, and that nobody else sees it."""

from __future__ import annotations

import io
import threading

import pytest

from nnsight_pp.engines.vllm import progress


class Terminal(io.StringIO):
    """A terminal, which says when something was written to it."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self._is_one = is_one
        self.is_written = threading.Event()

    def isatty(self) -> bool:
        return self._is_one

    def write(self, text: str) -> int:
        self.is_written.set()
        return super().write(text)


def test_a_terminal_shows_the_line_and_is_clean_after(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_one=True)
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.shown("Starting"):
        assert terminal.is_written.wait(5)
    shown = terminal.getvalue()
    assert "\rStarting: 0 s" in shown
    assert shown.endswith("\r\x1b[K")


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_one=False)
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.shown("Starting"):
        pass
    assert terminal.getvalue() == ""


def test_the_line_ends_with_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(is_one=True)
    monkeypatch.setattr("sys.stderr", terminal)
    with pytest.raises(ValueError, match="went wrong"):
        with progress.shown("Starting"):
            raise ValueError("went wrong")
    assert terminal.getvalue() == "\r\x1b[K"
