# A block under test binds names, and stands inside another `with`.
import importlib
import linecache
import os
import sys
import time

import pytest
import torch

from fakes.nets import Net, batch, run_file
from nnsight_pp import NNsight, WithBlockNotFoundError
from nnsight_pp.trace import loaded

X = batch(2)
TEXT = """
def run(model, X):
    factor = 2
    with model.trace(X):
        hidden = model.layers[0].output * factor
        if factor > 1:
            hidden = hidden + 1
        hidden = hidden.save()
    return hidden

def other():
    return 1
"""


@pytest.fixture
def model():
    return NNsight(Net())


@pytest.fixture
def edited(tmp_path):
    """Load `TEXT`, replace a piece of it in the file, and return the loaded `run`."""

    def edit(old, new):
        run = run_file(tmp_path, TEXT)["run"]
        text = TEXT.replace(old, new)
        assert text != TEXT
        (tmp_path / "user_code.py").write_text(text)
        linecache.checkcache()
        return run

    return edit


def expected(model):
    return model._module.layers[0](X) * 2 + 1


EDITS = {
    "another number in the block": ("+ 1", "+ 2"),
    "another name in the block": ("* factor", "* other"),
    "a line moved out of the if": (
        "            hidden = hidden + 1",
        "        hidden = hidden + 1",
    ),
    "a line added above": ("def run", "\n\ndef run"),
    "a line added in the block": ("        if", "        pass\n        if"),
    "the block is gone": (TEXT, "def run(): pass\n"),
    "the file cannot be parsed": ("def other", "def other("),
    "the file is empty": (TEXT, "\n"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_block_of_a_file_that_was_edited_since_is_refused(model, edited, edit):
    run = edited(*edit)
    with pytest.raises(WithBlockNotFoundError, match="was edited since it was loaded"):
        run(model, X)


HARMLESS = {
    "a comment in the block": ("* factor", "* factor  # a comment"),
    "another function": ("return 1", "return 2"),
    "a line added below": ("return 1", "return 1\n\n\nprint"),
}


@pytest.mark.parametrize("edit", HARMLESS.values(), ids=HARMLESS)
def test_edit_that_leaves_the_block_as_it_was_is_no_matter(model, edited, edit):
    assert torch.equal(edited(*edit)(model, X), expected(model))


def test_text_read_before_the_edit_is_still_right(model, tmp_path):
    run = run_file(tmp_path, TEXT)["run"]
    assert torch.equal(run(model, X), expected(model))
    (tmp_path / "user_code.py").write_text(TEXT.replace("+ 1", "+ 2"))
    assert torch.equal(run(model, X), expected(model))
    linecache.checkcache()
    with pytest.raises(WithBlockNotFoundError, match="edited"):
        run(model, X)


def test_module_loaded_again_after_an_edit_runs_the_new_block(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "nnsight_pp_reloaded.py"
    path.write_text(TEXT)
    module = importlib.import_module("nnsight_pp_reloaded")
    try:
        old = module.run
        assert torch.equal(old(model, X), expected(model))
        path.write_text(TEXT.replace("+ 1", "+ 20"))
        os.utime(path, (time.time() + 5, time.time() + 5))
        module = importlib.reload(module)
        assert torch.allclose(module.run(model, X), expected(model) + 19)
        with pytest.raises(WithBlockNotFoundError, match="edited"):
            old(model, X)
    finally:
        del sys.modules["nnsight_pp_reloaded"]


def test_nested_block_of_a_changed_file_is_found(model, tmp_path):
    text = """
    def run(model, inner, X):
        with model.trace(X):
            hidden = model.layers[0].output
            with inner.trace(hidden):
                twice = (inner.layers[0].output * 2).save()
        return twice
    """
    twice = run_file(tmp_path, text)["run"](model, NNsight(Net(3)), X)
    assert twice.shape == X.shape


def test_asserts_that_pytest_rewrote_do_not_look_like_an_edit(model, tmp_path):
    rewrite = pytest.importorskip("_pytest.assertion.rewrite")
    import ast

    text = TEXT.replace("        if factor", "        assert factor\n        if factor")
    path = tmp_path / "user_code.py"
    path.write_text(text)
    tree = ast.parse(text)
    rewrite.rewrite_asserts(tree, text.encode())
    names = {"__name__": "user_code"}
    exec(compile(tree, str(path), "exec"), names)
    assert torch.equal(names["run"](model, X), expected(model))


def test_file_older_than_the_process_is_not_compiled_again(tmp_path, monkeypatch):
    path = tmp_path / "old.py"
    path.write_text("x = 1\n")
    code = compile("x = 1\n", str(path), "exec")
    monkeypatch.setattr(loaded, "_BEGIN", time.time() + 10)
    monkeypatch.setattr(loaded, "compile", None, raising=False)
    assert loaded.is_as_loaded(code, {}, ["x = 2\n"], range(1, 2))


def test_begin_of_the_process_is_before_now_and_not_long_ago():
    assert time.time() - 24 * 3600 < loaded._begin_of_process() < time.time() - 0.5


def test_copy_with_an_old_time_is_not_taken_for_an_old_file(tmp_path):
    path = tmp_path / "copied.py"
    path.write_text("x = 1\n")
    os.utime(path, (1, 1))
    assert not loaded._is_older(str(path))
