"""The text that code was read from, as lines: a file, a notebook's cell, or `python -c`."""

from __future__ import annotations

import codecs
import linecache
import os
import stat
import sys
from functools import cache

from nnsight_pp.core.block import lines_of


def source_lines(filename: str) -> list[str]:
    """Return the lines of ``filename`` with their ends, or an empty list when there are none."""
    if filename == "<string>":
        return _command_lines()
    entry = linecache.cache.get(filename)
    if entry is not None and len(entry) > 1:  # as `getlines` does
        return entry[2]
    if entry is None and os.path.isabs(filename) and (lines := _read(filename)) is not None:
        return lines
    return linecache.getlines(filename)


# The lines of the file that was last read here, and when it had last changed by then.
_last: tuple[list[str], float] | None = None


def changed_before(lines: list[str], moment: float) -> bool:
    """Tell whether ``lines`` were just read here, from a file that did not change since ``moment``.

    No says nothing.
    """
    return _last is not None and _last[0] is lines and _last[1] < moment


def _read(filename: str) -> list[str] | None:
    """Fill `linecache` with a file of plain UTF-8 as it does itself, in a fifth of its steps.

    Return None, and leave it as it is, where there is no such file.
    """
    global _last
    try:
        file = os.open(filename, os.O_RDONLY)
        try:
            found = os.fstat(file)
            data = os.read(file, found.st_size + 1)
        finally:
            os.close(file)
        if len(data) != found.st_size or not stat.S_ISREG(found.st_mode):
            return None  # it changes now, or cannot be read at once
        head = data[: data.find(b"\n", data.find(b"\n") + 1)]
        if b"\r" in data or b"coding" in head or head.startswith(codecs.BOM_UTF8):
            return None  # a file may name its encoding in its first two lines
        if data and not data.endswith(b"\n"):
            data += b"\n"
        text = data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.splitlines(keepends=True)
    if len(lines) != data.count(b"\n"):  # they end at other characters too
        lines = lines_of(text)
    linecache.cache[filename] = (found.st_size, found.st_mtime, lines, filename)
    # A copy may keep an old time of its content, but not of its entry in the folder.
    _last = (lines, max(found.st_mtime, found.st_ctime))
    return lines


@cache
def _command_lines() -> list[str]:
    """Return the text of `python -c TEXT`, which is in no file."""
    arguments = iter(sys.orig_argv[1:])
    for argument in arguments:
        if not argument.startswith("-") or argument == "-":
            break
        if argument == "--check-hash-based-pycs":
            next(arguments, None)
        if argument.startswith("--"):
            continue
        for position, letter in enumerate(argument[1:], 2):
            rest = argument[position:]
            if letter == "c":
                return lines_of(rest or next(arguments, ""))
            if letter in "mWX":
                if not rest:
                    next(arguments, None)
                break
    return []
