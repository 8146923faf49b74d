"""What a block may look up before it binds it, and what it does to objects around it."""

from __future__ import annotations

import ast
import textwrap

import pytest

from nnsight_pp.core.sharing import uses_of

EARLY = {
    "a name that is bound first": ("h = 1\nprint(h)", {"print"}),
    "a name that is looked up first": ("print(h)\nh = 1", {"print", "h"}),
    "bound in a loop, used in it and behind it": (
        "for s in rows:\n    h = s\n    k = h\nh + s",
        {"rows"},
    ),
    "used at the next turn of a loop": (
        "for s in rows:\n    if s: v + 1\n    v = s",
        {"rows", "v"},
    ),
    "bound in one branch": ("if rows:\n    h = 1\nh", {"rows", "h"}),
    "bound in both branches": ("if rows:\n    h = 1\nelse:\n    h = 2\nh", {"rows"}),
    "the other branch leaves the loop": (
        "for s in rows:\n    if s: break\n    else: h = 1\n    h",
        {"rows"},
    ),
    "bound in a `try` that may fail": ("try:\n    h = f()\nexcept KeyError:\n    pass\nh", None),
    "bound in a `with`": ("with f() as g:\n    h = g\nh", {"f"}),
    "changed in place": ("n += 1", {"n"}),
    "deleted": ("h = 1\ndel h\nh", {"h"}),
    "read in a function that is called later": ("def f(a):\n    return a + h\nh = 1", {"h"}),
    "a function's own names": ("def f(a, *, b=3):\n    c = a + b\n    return c", set()),
    "a comprehension's own names": ("[x + y for x in rows for y in x]", {"rows"}),
    "bound in an expression": ("if (n := rows): n", {"rows"}),
    "bound by a pattern": (
        "match rows:\n    case [a, *b]: a, b\n    case {'k': c, **d}: c, d",
        None,
    ),
    "bound by an import": ("import os.path\nfrom math import pi as p\nos, p", set()),
    "bound while a `while` runs": ("while rows:\n    h = 1\nh", {"rows", "h"}),
}


@pytest.mark.parametrize("name", EARLY)
def test_names_that_are_looked_up_before_they_are_bound(name: str):
    text, wanted = EARLY[name]
    if wanted is None:
        wanted = {"f", "KeyError", "h"} if "try" in text else {"rows"}
    assert uses_of(ast.parse(text)).early == wanted


@pytest.mark.parametrize(
    ("text", "put", "seen"),
    [
        ("rows.append(h)", True, False),
        ("rows['a'] = h", True, False),
        ("rows[0][1] = h", True, True),
        ("rows.best = h", True, False),
        ("rows.save()", False, False),
        ("rows[0]", False, True),
        ("len(rows)", False, True),
        ("rows += [1]", True, True),
        ("rows['n'] += 1", True, True),
        ("rows.pop()", True, True),
        ("rows.zero_()", True, True),
        ("rows[0].zero_()", True, True),
        ("del rows[0]", True, False),
        ("rows[0].output[:] = 7", False, True),
        ("rows = []", False, False),
    ],
)
def test_what_a_statement_does_to_an_object(text: str, put: bool, seen: bool):
    uses = uses_of(ast.parse(textwrap.dedent(text)))
    assert ("rows" in uses.put, "rows" in uses.seen) == (put, seen)


def test_what_is_handed_to_a_function_may_be_changed_there():
    uses = uses_of(
        ast.parse(
            "f(rows, key=names)\ntool.put(third)\nlen(other)\ntorch.stack(other)\nh.append(other)"
        )
    )
    assert uses.handed >= {"rows", "names", "third"}
    assert "other" not in uses.handed
