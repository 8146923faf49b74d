"""The printed form of a function with its operations: its text, with their names in a gutter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnsight_pp.envoys.source_rewrite import Rewritten

# Lines shown above and below an operation that is printed alone.
_AROUND = 5


def with_gutter(rewritten: Rewritten) -> str:
    """Return the text of the function; each line behind the names of what it runs."""
    at: dict[int, list[str]] = {}
    for one in rewritten.operations:
        at.setdefault(one.line, []).append(one.name)
    wide = max((len(name) for name in rewritten.names), default=0)
    digits = len(str(rewritten.first_line + len(rewritten.lines)))
    shown = []
    for number, text in enumerate(rewritten.lines, rewritten.first_line):
        names = at.get(number, [])
        mark = "*" if number == rewritten.first_line else " "
        if mark == "*":
            text = text.lstrip()
        head = f"{names[0]:>{wide}} -> " if names else " " * (wide + 4)
        shown.append(f"{head}{number:>{digits}} {mark} {text}".rstrip())
        shown += [f"{name:>{wide}} ->{'+':>{digits + 1}}" for name in names[1:]]
    return "\n".join(shown)


def marked(path: str, rewritten: Rewritten, number: int) -> str:
    """Return the lines around one operation, its own marked."""
    line = rewritten.operations[number].line
    first = max(rewritten.first_line, line - _AROUND)
    last = min(rewritten.first_line + len(rewritten.lines) - 1, line + _AROUND)
    digits = len(str(last))
    shown = [f"{path}:", ""]
    for here in range(first, last + 1):
        text = rewritten.lines[here - rewritten.first_line]
        if here == line:
            shown.append(f"--> {here:>{digits}} {text} <--")
        else:
            shown.append(f"    {here:>{digits}} {text}".rstrip())
    return "\n".join(shown)
