"""Whether the text of a file is still the text of the code that runs.

A file can be edited after it was imported, and the block of a `with` taken from the new text would
not be the user's. Two tests, the cheap one first: a file that did not change since this process
began holds what was loaded. Any other is compiled, and the instructions of the body are compared
with those of the running code: operation by operation, with their names, constants and lines.
Comments may differ, and so may the rest of the file.

Text that somebody put into `linecache` (a notebook's cells) is the text that he compiled.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import time
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.block import Scope
from nnsight_pp.core.meaning import all_codes
from nnsight_pp.trace.lines import changed_before

if TYPE_CHECKING:
    from collections.abc import Container

# pytest compiles test files with their `assert` statements rewritten, and leaves this name there.
_REWRITTEN = "@pytest_ar"
_NO_CODE = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})


# The lines of each file that were last found to be those of running code.
_checked: dict[str, list[str]] = {}


def _begin_of_process() -> float:
    """Return a time not after the one at which this process loaded its first file."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return now - 1.0
    # CAUTION: a container may hide the true uptime, so the import of this file bounds it.
    return min(now, now - uptime + ticks / os.sysconf("SC_CLK_TCK")) - 1.0


# A forked child inherits it, with the code that its parent has loaded.
_BEGIN = _begin_of_process()


def is_as_loaded(code: CodeType, names: dict[str, Any], lines: list[str], body: range) -> bool:
    """Tell whether the lines ``body`` of ``lines`` are those that ``code`` was compiled from.

    Args:
        code: The running code that holds the `with`.
        names: Its globals.
        lines: The text of its file, as `linecache` has it now.
        body: Line numbers of the body.

    Cost: one `stat` at most for a file older than the process; else one compilation of the file.
    """
    filename = code.co_filename
    if changed_before(lines, _BEGIN):
        return True
    if filename != "<string>" and (_is_in_memory(filename) or _is_older(filename)):
        return True
    if isinstance(names, Scope):
        # The code is that of a block, which was compiled from these lines or from older ones.
        return _checked.get(filename) is lines
    text = "".join(lines)
    try:
        loaded = compile(text, filename, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    left_out: set[object] = set()
    if _REWRITTEN in names:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assert):
                left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    running = _operations(code, body, left_out)
    is_same = any(
        (other.co_name, other.co_qualname) == (code.co_name, code.co_qualname)
        and _operations(other, body, left_out) == running
        for other in all_codes(loaded)
    )
    if is_same:
        _checked[filename] = lines
    return is_same


def _is_in_memory(filename: str) -> bool:
    entry = linecache.cache.get(filename)
    return entry is not None and len(entry) > 1 and entry[1] is None


def _is_older(filename: str) -> bool:
    if not os.path.isabs(filename):
        return False
    try:
        found = os.stat(filename)
    except OSError:
        return False
    # A copy may keep an old time of its content, but not of its entry in the folder.
    return max(found.st_mtime, found.st_ctime) < _BEGIN


def _operations(
    code: CodeType, body: Container[object] | None, left_out: Container[object]
) -> list[tuple[str, str, int | None]]:
    """Return the operations of ``code`` in the lines of ``body``, in an order that compares."""
    found: list[tuple[dis.Instruction, int | None]] = []
    for one in dis.get_instructions(code):
        line = one.positions.lineno if one.positions is not None else None
        inside = body is None or line in body
        if inside and line not in left_out and one.opname not in _NO_CODE:
            found.append((one, line))
    places = {one.offset: number for number, (one, _) in enumerate(found)}
    return [(one.opname, _argument(one, places, left_out), line) for one, line in found]


def _argument(one: dis.Instruction, places: dict[int, int], left_out: Container[object]) -> str:
    if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
        return str(places.get(one.argval, "outside"))
    if isinstance(one.argval, CodeType):
        return repr(_operations(one.argval, None, left_out))
    if isinstance(one.argval, frozenset):
        return repr(sorted(map(repr, one.argval)))
    return repr(one.argval)
