"""What a block may look up before it binds it, and what it does to objects around it."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch

from nnsight_pp.core.block import Block, Scope
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
    changed = uses.put | {name for name, _ in uses.put_by}
    assert ("rows" in changed, "rows" in uses.seen) == (put, seen)


def test_what_is_handed_to_a_function_may_be_changed_there():
    uses = uses_of(
        ast.parse(
            "f(rows, key=names)\ntool.put(third)\nlen(other)\ntorch.stack(other)\nh.append(other)"
        )
    )
    assert uses.handed >= {"rows", "names", "third"}
    assert "other" not in uses.handed


# What may be looked up of `a`, `b` and `c`, which are bound somewhere in each text.
NEEDED = {
    "bound first": ("a = 1\nb = a\nc = a + b", ""),
    "looked up first": ("b = a\na = 1\nc = 2", "a"),
    "by its own value": ("a = a + 1\nb = c = 2\nb, c", "a"),
    "changed in place": ("a += 1\nb = c = 2\nb, c", "a"),
    "an item set first": ("a[0] = 1\na = b = c = 2\na, b, c", "a"),
    "a loop may run no turn": ("for a in rows:\n    b = a\n    c = b\na, b, c", "abc"),
    "inside of a loop": ("for a in rows:\n    b = a\n    c = b", ""),
    "of the turn before": ("for a in rows:\n    if c: b = 1\n    c = a", "c"),
    "an item as the target of a loop": ("for a[0] in rows:\n    b = c = 1\na = b + c", "abc"),
    "while": ("while rows:\n    a = b = rows.pop()\nelse:\n    c = 1\na, b, c", "abc"),
    "one branch": ("if rows:\n    a = b = 1\nelse:\n    b = 2\nc = b\na", "a"),
    "both branches": ("if rows:\n    a = 1\nelse:\n    a = 2\nb = a\nc = b", ""),
    "a branch that raises": ("if rows:\n    a = 1\nelse:\n    raise E\nb = a\nc = b", ""),
    "a `try` that may fail": ("try:\n    a = f()\nexcept E as b:\n    c = b\na, c", "abc"),
    "a `try` that is over": ("try:\n    a = f()\nfinally:\n    b = 1\nc = a, b", ""),
    "looked up in `finally`": ("try:\n    a = b = f()\nfinally:\n    a\nc = b\nc", "a"),
    "a `with` that may go on": ("with f() as a:\n    b = a\nc = b", "b"),
    "a mode of torch": ("with torch.no_grad():\n    a = b = 1\nc = a, b", ""),
    "deleted": ("a = 1\ndel a\na\nb = 1\nc = b", "a"),
    "deleted at the next turn": ("a = b = 1\nfor c in rows:\n    a, b\n    del a", "a"),
    "in a function that is called later": ("def f():\n    return a\na = f()\nb = c = 1", "a"),
    "in a function, bound before": ("a = b = 1\ndef f(c):\n    return a, b, c", ""),
    "bound by a function": ("def f():\n    global a\n    a = 1\nf()\na\nb = c = 1", "a"),
    "in a lambda": ("f = lambda: a\na = 1\nb = c = f()", "a"),
    "in a comprehension": ("a = [b for c in rows]\nb = c = 1\nb, c", "b"),
    "a comprehension's own": ("a = [b for b in rows]\na, [c for c in a]", ""),
    "in a class": ("class f:\n    a = a\na = b = c = 1", "a"),
    "in the text of a format": ("a = f'{b!r:{c}}'\nb = c = a", "bc"),
    "an expression that may be left out": ("rows and (a := 1)\nb = a\nc = b", "a"),
    "annotated only": ("a: int\nb = a\na = c = 1\nc", "a"),
    "imported": ("import a\nfrom f import b as c\na, c\nb = 1", ""),
    "by a pattern": ("match rows:\n    case [a, *b]:\n        c = a, b\nc", "c"),
    "names that no text shows": ("a = 1\na\nb = c = locals()['a']\nb, c", "abc"),
    "names that a text may show": ("a = 1\nb = eval('a')\nc = a, b\nc", "abc"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_names_that_a_block_needs_from_around_it(name: str):
    text, wanted = NEEDED[name]
    block = Block("cell.py", 5, textwrap.indent(text, "    ") + "\n", "run")
    assert {*"abc"} & block.reads() & block.needs() == {*wanted}


class Entered:
    """Stands for a value of each kind; as a `with`, goes on behind an error."""

    def __repr__(self) -> str:
        return "Entered"

    def __enter__(self) -> int:
        return 1

    def __exit__(self, *_: object) -> bool:
        return True


def outcome(block: Block, around: dict[str, object]) -> tuple[dict[str, str], str]:
    """Return what ``block`` binds where it sees ``around``, and what it raises."""
    scope, raised = Scope(around), ""
    try:
        exec(block.code(), scope)
    except Exception as error:
        raised = repr(error)
    return {name: repr(scope[name]) for name in "abc" if name in scope}, raised


@pytest.mark.parametrize("rows", [[], [1], [[1, 2], 3]], ids=str)
@pytest.mark.parametrize("name", NEEDED)
def test_a_block_does_the_same_without_the_names_that_it_does_not_need(name: str, rows: list[int]):
    block = Block("cell.py", 5, textwrap.indent(NEEDED[name][0], "    ") + "\n", "run")

    def around(names: frozenset[str]) -> dict[str, object]:
        outer = {"a": [10], "b": [20], "c": [30]}
        known: dict[str, object] = {key: value for key, value in outer.items() if key in names}
        return {"rows": [*rows], "f": Entered, "E": ValueError, "torch": torch, **known}

    assert outcome(block, around(block.needs())) == outcome(block, around(block.reads()))
