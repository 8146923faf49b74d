import builtins
import linecache
import traceback
from types import SimpleNamespace

import pytest

from nnsight_pp.core.block import Block, Scope, lines_of
from nnsight_pp.core.meaning import IS


def block(source, first_line=10, **options):
    return Block("user.py", first_line, source, "run", **options)


def run(source, *around, **options):
    scope = Scope(*around)
    exec(block(source, **options).code(), scope)
    return scope.own()


def test_error_stands_at_the_line_of_the_file_and_in_the_users_function():
    with pytest.raises(ZeroDivisionError) as caught:
        run("    a = 1\n    1 / 0\n")
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.name) == ("user.py", 11, "run")


def test_block_on_the_second_line_of_its_file():
    with pytest.raises(ZeroDivisionError) as caught:
        run("  1 / 0\n", first_line=2)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 2


def test_names_that_are_read_and_bound():
    made = block(
        "    total = outer + 1\n"
        "    count += 1\n"
        "    rows = [each for each in rows_of(total)]\n"
        "    kept = [last := each for each in rows]\n"
        "    import os.path as where, sys\n"
        "    def f(x):\n        global wide\n        wide = inner_name\n        return x\n"
        "    for i, (j, *k) in pairs: pass\n"
        "    try: 1\n    except ValueError as error: pass\n"
        "    thing.attribute.other = 3\n"
    )
    around = {"outer", "count", "rows_of", "inner_name", "pairs", "thing", "ValueError"}
    assert around <= made.reads()
    assert "each" not in made.reads()
    assert made.binds() == {
        "total", "count", "rows", "kept", "last", "where", "sys", "f", "wide", "i", "j", "k",
        "error",
    }  # fmt: skip


def test_scope_prefers_own_names_then_the_innermost_around():
    scope = Scope({"a": 1}, {"a": 2, "b": 3})
    exec("c = a + b; a = 10", scope)
    assert scope.own() == {"c": 4, "a": 10}
    assert scope.own_name("c") == 4
    with pytest.raises(KeyError):
        scope.own_name("b")
    with pytest.raises(KeyError):
        scope.own_name("__builtins__")


def test_scope_tells_functions_and_classes_their_module():
    scope = Scope({"x": 1}, {"__name__": "users.module"})
    exec("def f(): return x\nclass A: pass", scope)
    assert scope["f"].__module__ == scope["A"].__module__ == "users.module"
    assert scope["f"]() == 1
    assert Scope()["__name__"] == "__main__"


def test_text_at_the_head_is_no_docstring():
    assert run("    'text'\n    a = 1\n") == {"a": 1}


def test_lines_end_only_where_the_compiler_ends_them():
    text = "a = 'x\x0cy\u2028z'\r\nb = 1\n"
    assert lines_of(text) == ["a = 'x\x0cy\u2028z'\r\n", "b = 1\n"]


@pytest.mark.parametrize("source", ["    pass\n", "    'text'\n", "    1 + 1\n", "    ...\n"])
def test_block_without_effect_does_nothing(source):
    assert block(source).does_nothing()


@pytest.mark.parametrize("source", ["    a = 1\n", "    f()\n", "    a\n", "    'x'; a = 1\n"])
def test_block_with_an_effect_does_something(source):
    assert not block(source).does_nothing()


def test_lines_are_shown_where_the_file_is_missing():
    made = Block("/nowhere/user.py", 3, "    a = 1\n    b = 2\n", "run")
    made.show_in_tracebacks()
    try:
        assert linecache.getline("/nowhere/user.py", 4) == "    b = 2\n"
    finally:
        del linecache.cache["/nowhere/user.py"]


def test_nonlocal_of_a_function_inside_a_function_stays_one():
    source = (
        "    def outer():\n        n = 1\n        def inner():\n            nonlocal n\n"
        "            n += 1\n        inner()\n        return n\n    found = outer()\n"
    )
    assert run(source)["found"] == 2


def test_class_in_a_function_of_the_block_sees_the_functions_names():
    source = (
        "    def make(value):\n        class A:\n            own = value\n            far = outer\n"
        "            own = own + 1\n        return A\n    a = make(5)\n"
    )
    made = run(source, {"outer": 7})["a"]
    assert (made.own, made.far) == (6, 7)


@pytest.mark.parametrize("annotation", ["", ": object"])
def test_the_operator_that_asks_no_object_can_be_answered_by_another(annotation):
    source = (
        f"    a{annotation} = None\n"
        "    'no docstring'\n"
        "    found = [a is None, a is not None, None is b, not (b is None)]\n"
        "    def inner(): return b is None if a is None else 0\n"
        "    found.append(inner())\n"
    )
    made = block(source)
    asked = []
    kind = SimpleNamespace(**{IS: lambda *pair: asked.append(pair) or pair == ("B", None)})
    names = {**vars(builtins), "type": kind}
    scope = {"b": "B", "__builtins__": names}
    exec(made.code_for_stand_ins(), scope)
    assert scope["found"] == [False, True, False, False, 0]
    assert asked == [(None, None), (None, None), (None, "B"), ("B", None), (None, None)]
    for code in (made.code(), made.code_for_stand_ins()):
        own = {"b": "B"}
        exec(code, own)
        assert own["found"] == [True, False, False, True, False]
    plain = block("    a = 1\n")
    assert plain.code_for_stand_ins() is plain.code()
    assert IS not in made.reads()
