"""A line on the terminal that says what the user waits for, and for how long already."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVERY_S = 1.0


@contextmanager
def shown(text: str) -> Iterator[None]:
    """Show ``text`` with the seconds since, until the body is over; then take it away.

    Nothing is shown where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    started = time.monotonic()
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(_EVERY_S):
            sys.stderr.write(f"\r{text}: {time.monotonic() - started:.0f} s")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    line = threading.Thread(target=show, daemon=True, name="nnsight_pp progress")
    line.start()
    try:
        yield
    finally:
        is_over.set()
        line.join()
