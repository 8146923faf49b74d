"""The block of a usual `with`, found in its lines without parsing them.

A usual `with` begins its line, has one item, and ends that line with its colon. The running code
says on which lines it begins and ends (from Python 3.11 on), so all that is left is to see that its
header is one line: then the rest is the body. Anything else, and every error, is for
`trace.capture`, which parses.
"""

from __future__ import annotations
import __future__ as future

import re
from itertools import islice
from typing import TYPE_CHECKING

from nnsight_pp.core.block import Block
from nnsight_pp.trace.loaded import is_as_loaded

if TYPE_CHECKING:
    from types import CodeType, FrameType

_TEXT_OR_COMMENT = re.compile(r"""\"[^"\\\n]*\"|'[^'\\\n]*'|#.*""")
_BRACKETS = re.compile(r"\([^][(){}]*\)|\[[^][(){}]*\]|\{[^][(){}]*\}")
_HEADER = re.compile(r"\s*with [\w.]+(?: as \w+)?:\s*")
_TRY = re.compile(r"\btry\b")
_NOT_PLAIN = frozenset("\"'#\\()[]{}")


def position(frame: FrameType) -> tuple[int | None, ...]:
    """Return the first and last line, first and last column of what ``frame`` runs now."""
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)


def block_in(code: CodeType, first_line: int, text: str, around: str = "") -> Block:
    """Return the block ``text``, which stands in ``code``; see `Block`."""
    flags = code.co_flags & future.annotations.compiler_flag
    receiver = code.co_varnames[0] if code.co_argcount and "__class__" in code.co_freevars else ""
    text = text.rstrip("\r\n") + "\n"
    return Block(code.co_filename, first_line, text, code.co_name, flags, receiver, around)


def usual_block(frame: FrameType, lines: list[str]) -> Block | None:
    """Return the block of the `with` that ``frame`` enters, or None where it is not a usual one.

    Cost: that of compiling its lines.
    """
    first, last, column, _ = position(frame)
    if first is None or last is None or column is None or not first < last <= len(lines):
        return None
    header = lines[first - 1]
    if header[:column].strip(" \t") or not header.startswith("with ", column):
        return None  # it does not begin its line
    if not is_whole_header(header):
        return None
    start = first + 1
    while lines[start - 1].lstrip()[:1] in ("", "#"):  # no statement begins on it
        start += 1
        if start > last:
            return None
    text = "".join(lines[start - 1 : last])
    # A `try:` must not come first; what else must not be there, the compiler refuses.
    body = range(start, last + 1)
    if "try" in text and _TRY.search(text):
        return None
    if not is_as_loaded(frame.f_code, frame.f_globals, lines, body):
        return None
    block = block_in(frame.f_code, start, text)
    try:
        block.code()
    except SyntaxError:
        return None
    return block


def is_whole_header(line: str) -> bool:
    """Tell whether ``line`` is all of the header of a `with` of one item, and nothing else.

    It may say no where it is one.
    """
    if _is_one_call(line):  # the usual case, seen at a glance
        return True
    if '"""' in line or "'''" in line:
        return False
    line, found = _TEXT_OR_COMMENT.sub("", line), 1
    if '"' in line or "'" in line or "\\" in line:
        return False
    while found:
        line, found = _BRACKETS.subn("", line)
    return _HEADER.fullmatch(line) is not None


def _is_one_call(line: str) -> bool:
    """Tell whether ``line`` is `with a.b(...):` or `with a.b(...) as c:`, its arguments plain."""
    called, _, rest = line.strip().partition("(")
    given, is_closed, rest = rest.partition(")")
    is_call = called.startswith("with ") and called[5:].replace(".", "").isidentifier()
    if not is_call or not is_closed or not _NOT_PLAIN.isdisjoint(given):
        return False
    is_named = rest.startswith(" as ") and rest[4:-1].isidentifier() and rest.endswith(":")
    return rest == ":" or is_named
