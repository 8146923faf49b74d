"""A usual `with` is told by its lines; everything else is left to the parser."""

from __future__ import annotations

import ast
import codecs
import linecache

import pytest

from nnsight_pp.core.block import Block
from nnsight_pp.trace.lines import source_lines
from nnsight_pp.trace.usual import is_whole_header

WHOLE = [
    "with model.trace(x):",
    "    with model.trace(x) as tracer:  # see (1), don't ask\n",
    'with model.trace("a: b # c (", [1, {"k": (2,)}]) as t:',
    "with tracer.invoke('it is'):",
    "with session:",
    "with models[0].layers[i + 1].trace(x):",
]
NOT_WHOLE = [
    "with model.trace(",
    "with model.trace(x,  # ):",
    "with model.trace(x), other(y):",
    "with (model.trace(x) as a, other(y) as b):",
    "with model.trace(x): first = 1",
    "with model.trace(x) as tracer: \\",
    "with model.trace(x) \\",
    'with model.trace("""a):',
    "with model.trace('''a''', '''):",
    "with model.trace(x) as (a, b):",
    "with model.trace('a\\'):",
    "with model.trace(f(x):",
    "async with model.trace(x):",
]


@pytest.mark.parametrize("line", WHOLE)
def test_a_header_on_one_line_is_known(line):
    assert is_whole_header(line)
    assert isinstance(ast.parse(f"{line.strip()}\n pass").body[0], ast.With)


@pytest.mark.parametrize("line", NOT_WHOLE)
def test_what_may_be_more_than_a_header_is_left_to_the_parser(line):
    assert not is_whole_header(line)


@pytest.mark.parametrize(
    "data",
    [
        b"a = 1\nb = 2\n",
        b"a = 1\nb = 2",
        b"a = '\x0c\x1c'\r\nb = 2\r\n",
        codecs.BOM_UTF8 + b"a = 1\n",
        b"# coding: latin-1\na = '\xe9'\n",
        b"#!python\n# vim: set fileencoding=latin-1 :\na = '\xe9'\n",
        "a = 'é\u2028'\nb = 2".encode(),
        b"",
        b"\n",
    ],
)
def test_lines_are_those_that_python_reads(data, tmp_path):
    path = str(tmp_path / "text.py")
    (tmp_path / "text.py").write_bytes(data)
    lines = source_lines(path)
    kept = linecache.cache.pop(path, None)
    assert lines == linecache.getlines(path)
    assert kept == linecache.cache.get(path)


@pytest.mark.parametrize(
    "body",
    [
        "    'text'\n    x = 1\n",
        "    x: int = y\n",
        "    def f():\n        nonlocal x\n        x = 1\n",
        "    class A:\n        z = y\n",
        "    f = lambda: super().go()\n",
        "    import os.path as p, sys\n    del q\n    r = [a for a in b]\n",
        "    f = lambda g: h\n    global k\n    k = 1\n",
        f"    {'; '.join(f'n{i} = m{i}' for i in range(300))}\n",
    ],
)
def test_names_of_a_block_are_those_that_its_text_shows(body):
    block = Block("f", 2, body, "f")
    tree = ast.parse("if 1:\n" + body)
    names = {n.id: type(n.ctx) for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert block.binds() | block.reads() <= names.keys() | {"f", "A", "p", "sys", "__name__"}
    for i in range(300 if "n299" in body else 0):
        assert f"n{i}" in block.binds()
        assert f"m{i}" in block.reads()
