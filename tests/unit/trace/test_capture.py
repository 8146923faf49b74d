# A block under test binds names, and stands inside another `with`.
import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import traceback
from contextlib import nullcontext

import pytest
import torch

from fakes.nets import Net, batch, run_file
from nnsight_pp import BlockShapeError, NNsight, WithBlockNotFoundError, save

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net())


def last_line(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


# ------------------------------------------------------------------ where a block may stand


def test_block_in_a_function(model):
    with model.trace(X):
        hidden = model.layers[1].output.save()
    assert hidden.shape == X.shape


class Holder:
    def __init__(self, model):
        self.model = model

    def hidden(self, index):
        with self.model.trace(X):
            hidden = self.model.layers[index].output.save()
        return hidden


def test_block_in_a_method_sees_self_and_arguments(model):
    assert torch.equal(Holder(model).hidden(0), model._module.layers[0](X))


def test_block_at_module_level(model, tmp_path):
    text = """
    with model.trace(X) as tracer:
        hidden = model.layers[0].output.save()
        unsaved = 1
    """
    found = run_file(tmp_path, text, model=model, X=X)
    assert found["hidden"].shape == X.shape
    assert "unsaved" not in found


def test_block_in_a_class_body(model):
    class Found:
        with model.trace(X):
            hidden = model.layers[0].output.save()
        shape = hidden.shape

    assert Found.shape == X.shape


def test_block_in_an_async_function(model):
    async def later():
        return 2.0

    async def hidden():
        factor = await later()
        with model.trace(X):
            found = (model.layers[0].output * factor).save()
        return found, await later()

    coroutine = hidden()
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert torch.equal(done.value.value[0], model._module.layers[0](X) * 2)


def test_block_in_a_generator(model):
    def hiddens():
        for index in range(2):
            with model.trace(X):
                hidden = model.layers[index].output.save()
            yield hidden

    assert [hidden.shape for hidden in hiddens()] == [X.shape] * 2


SCRIPT = """
import torch
from torch import nn
import nnsight_pp
model = nnsight_pp.NNsight(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
with model.trace(torch.ones(1, 2)) as tracer:
    # a comment
    first = model[0].output.save()
print("got", tuple(first.shape))
"""


def python(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-c"], ["-W", "ignore", "-Xutf8", "-Bc"]])
def test_block_in_the_text_of_python_c(flags):
    done = python(*flags, SCRIPT)
    assert done.stdout == "got (1, 2)\n", done.stderr


@pytest.mark.slow
def test_exec_in_python_c_does_not_take_the_text_of_the_command():
    text = textwrap.indent(SCRIPT, "    ").replace("first = ", "wrong = ")
    script = f"{SCRIPT}\ntry:\n    exec({SCRIPT.replace('first', 'other')!r})\n"
    script += "except nnsight_pp.WithBlockNotFoundError as error:\n    print('no source', error)\n"
    script += f"if 0:\n{text}"
    done = python("-c", script)
    assert done.stdout.splitlines()[0] == "got (1, 2)", done.stderr
    assert done.stdout.splitlines()[1].startswith("no source"), done.stdout + done.stderr


def test_exec_without_source_has_no_block(model):
    text = "with model.trace(X):\n    hidden = model.layers[0].output.save()\n"
    with pytest.raises(WithBlockNotFoundError, match="no source text"):
        exec(text, {"model": model, "X": X})


def test_entering_by_hand_has_no_with_statement(model):
    with pytest.raises(WithBlockNotFoundError, match="no `with` statement"):
        model.trace(X).__enter__()


# ----------------------------------------------------------------------------- shapes of headers


def test_header_of_several_lines(model):
    with model.trace(
        X,
        scale=2.0,
    ) as tracer:
        out = tracer.result.save()
    assert torch.equal(out, model._module(X, scale=2.0))


def test_parenthesised_header_with_the_name_on_a_line_of_its_own(model):
    with (
        torch.no_grad(),
        model.trace(
            X
        ) as tracer,
    ):  # fmt: skip
        out = tracer.result.save()
        grad = torch.is_grad_enabled().save()
    assert torch.equal(out, model._module(X))
    assert grad is False


def test_context_managers_before_the_tracer_are_around_the_run(model):
    with torch.no_grad(), model.trace(X):
        out = model.output.save()
    assert not out.requires_grad


def test_context_managers_behind_the_tracer_are_entered_around_the_run(model):
    log = []

    @contextlib.contextmanager
    def noted(name):
        log.append(f"{name} begins")
        yield name
        log.append(f"{name} ends")

    with model.trace(X) as tracer, noted("one") as one, torch.no_grad(), noted("two"):
        log.append(one)
        out = tracer.result.save()
    assert not out.requires_grad
    assert torch.is_grad_enabled()
    assert log == ["one begins", "two begins", "one", "two ends", "one ends"]


def test_context_managers_on_further_lines_are_entered_once(model):
    with (
        nullcontext(),
        model.trace(X) as tracer,
        nullcontext(2) as factor,
        torch.no_grad(),
    ):
        out = save(tracer.result * factor)
    assert torch.equal(out, model._module(X) * 2)
    assert not out.requires_grad


def test_what_a_context_manager_behind_the_tracer_swallows_is_gone(model):
    with model.trace(X), contextlib.suppress(KeyError):
        raise KeyError
    with pytest.raises(KeyError):
        with model.trace(X), torch.no_grad():
            raise KeyError


def test_two_tracers_in_one_with_are_refused(model):
    ran = []
    with pytest.raises(BlockShapeError, match="Two tracers"):
        with model.trace(X), NNsight(Net(3)).trace(X):
            ran.append(1)
    assert ran == []


def test_context_manager_behind_an_invoke_is_refused(model):
    ran = []
    with pytest.raises(BlockShapeError, match="last item"):
        with model.trace() as tracer:
            with tracer.invoke(X), torch.no_grad():
                ran.append(1)
    assert ran == []


def test_two_withs_on_following_lines_are_told_apart(model):
    with nullcontext():
        with model.trace(X):
            with nullcontext():
                hidden = model.layers[0].output.save()
    assert hidden.shape == X.shape


def test_tracer_stored_before_the_with(model):
    tracer = model.trace(X)
    with tracer as same:
        hidden = model.layers[0].output.save()
    assert same is tracer
    assert hidden.shape == X.shape


def test_tracer_is_good_for_one_with(model):
    tracer = model.trace(X)
    with tracer:
        hidden = model.layers[0].output.save()
    with pytest.raises(BlockShapeError, match="already been used"):
        with tracer:
            hidden = None
    assert hidden is not None


def test_body_on_the_with_line_is_refused(model, tmp_path):
    with pytest.raises(BlockShapeError, match="own line"):
        run_file(tmp_path, "with model.trace(X): a = 1\n", model=model, X=X)


def test_body_that_starts_with_try_is_refused(model, tmp_path):
    text = """
    with model.trace(X):
        try:
            a = 1
        finally:
            b = 2
    """
    with pytest.raises(BlockShapeError, match="cannot start with `try:`"):
        run_file(tmp_path, text, model=model, X=X)


def test_try_that_is_the_first_to_run_is_refused(model, tmp_path):
    text = """
    with model.trace(X):
        "a text"
        if True:
            try:
                a = 1
            except BaseException:
                ran = True
    """
    with pytest.raises(BlockShapeError, match="cannot start with `try:`"):
        run_file(tmp_path, text, model=model, X=X)


@pytest.mark.parametrize("body", ["pass", '"just a text"', "...", "1 + 1", "if True: pass"])
def test_body_without_effect_runs_the_model(model, tmp_path, body):
    calls = []
    model._module.register_forward_hook(lambda *_: calls.append(1))
    text = f"try:\n    with model.trace(X):\n        {body}\nfinally:\n    pass\n"
    run_file(tmp_path, text, model=model, X=X)
    assert calls == [1]


# ------------------------------------------------------------------------------ shapes of bodies


# fmt: off
def test_comments_blank_lines_and_texts_at_column_0(model):
    with model.trace(X):

# a comment at column 0
        text = """first
    second
\tthird # not a comment
""".save()

        @staticmethod
        # a comment below a decorator
        def twice(x): return x * 2
        # the last comment of the block

        hidden = twice(model.layers[0].output).save()
    assert text == "first\n    second\n\tthird # not a comment\n"
    assert torch.equal(hidden, model._module.layers[0](X) * 2)


def test_body_that_starts_with_a_decorator(model):
    with model.trace(X):
        @staticmethod
        def twice(x):
            return x * 2
        hidden = twice(model.layers[0].output).save()
    assert hidden.shape == X.shape
# fmt: on


def test_nested_functions_lambdas_comprehensions_and_walrus(model):
    factor = 3
    with model.trace(X):

        def scaled(x):
            return x * factor

        twice = lambda x: x * 2  # noqa: E731
        first = model.layers[0].output
        values = [scaled(twice(row)) for row in first].save()
        table = {index: (last := index) * factor for index in range(3)}.save()
        kept = last.save()
        total = sum(value.sum() for value in values).save()
    assert len(values) == 2
    assert table == {0: 0, 1: 3, 2: 6}
    assert kept == 2
    assert torch.allclose(total, model._module.layers[0](X).sum() * 6)


def test_class_in_a_block_sees_names_around_it(model):
    factor = 5
    with model.trace(X):

        class Scaler:
            """Has a docstring."""

            by = factor
            shape: tuple = X.shape

            def __call__(self, x):
                return x * self.by + factor

        made = save(Scaler())
        doc = Scaler.__doc__.save()
        hidden = made(model.layers[0].output).save()
    assert (made.by, doc, type(made).__module__) == (5, "Has a docstring.", __name__)
    assert type(made).__annotations__ == {"shape": tuple}
    assert torch.equal(hidden, model._module.layers[0](X) * 5 + 5)


def test_nonlocal_in_a_function_of_the_block_means_the_blocks_name(model):
    with model.trace(X):
        count = 0

        def bump():
            nonlocal count
            count += 1

        bump()
        bump()
        found = count.save()
    assert found == 2


def test_annotation_of_a_name_that_only_type_checkers_know(model):
    with model.trace(X):
        hidden: NotDefinedHere = model.layers[0].output.save()  # noqa: F821
        later: NotDefinedHere  # noqa: F821, F842
    assert hidden.shape == X.shape


def test_future_annotations_of_the_file_hold_in_the_block(model, tmp_path):
    text = """
    from __future__ import annotations
    with model.trace(X):
        def same(x: NotDefinedHere) -> NotDefinedHere:
            return x
        hidden = same(model.layers[0].output).save()
    """
    assert run_file(tmp_path, text, model=model, X=X)["hidden"].shape == X.shape


def test_imports_and_del_in_a_block(model):
    with model.trace(X):
        import math
        from os import path as where

        root = math.sqrt(16).save()
        base = where.basename("a/b").save()
        gone = 1
        del gone
    assert (root, base) == (4.0, "b")
    assert "gone" not in locals()


def test_del_of_a_name_that_the_block_did_not_bind_is_an_error(model):
    outer = 1
    with pytest.raises(NameError):
        with model.trace(X):
            del outer
    assert outer == 1  # noqa: F821


LEAVING = {
    "return 1": "`return` cannot stand",
    "yield 1": "`yield` cannot stand",
    "await later()": "`await` cannot stand",
    "[y async for y in later()]": "`async for` cannot stand",
    "nonlocal outer": "`nonlocal` cannot stand",
}


@pytest.mark.parametrize(("statement", "message"), LEAVING.items())
def test_statement_that_would_leave_the_block_is_refused_at_its_line(
    model, tmp_path, statement, message
):
    body = f"with model.trace(X):\n        a = 1\n        {statement}\n"
    text = f"async def run():\n    model\n    {body}"
    if "yield" in statement or "return" in statement:
        text = text.replace("async ", "")
    if "nonlocal" in statement:
        text = f"def wrap(model, outer=1):\n{textwrap.indent(text.replace('async ', ''), '    ')}\n"
        text += "    run()\nwrap(model)\n"
    text += "r = run()\nnext(r) if hasattr(r, '__next__') else r.send(None)\n" * (
        "nonlocal" not in statement
    )
    with pytest.raises(SyntaxError, match=message) as caught:
        run_file(tmp_path, text, model=model, X=X)
    assert (caught.value.text or "").strip() == statement
    assert caught.value.filename == str(tmp_path / "user_code.py")


def test_break_of_a_loop_around_the_block_is_refused(model, tmp_path):
    text = """
    for i in range(2):
        with model.trace(X):
            for j in range(2):
                break
            if i:
                break
    """
    with pytest.raises(SyntaxError, match="`break` of a loop around") as caught:
        run_file(tmp_path, text, model=model, X=X)
    assert caught.value.lineno == 7


def test_functions_of_a_block_may_return_yield_and_await(model):
    with model.trace(X):

        async def coroutine():
            return 1

        def generator():
            yield 1

        found = list(generator()).save()
        kind = coroutine.__name__.save()
    assert (found, kind) == ([1], "coroutine")


# ----------------------------------------------------------------------------------- exceptions


def test_exception_of_a_block_keeps_class_line_cause_and_context(model):
    class OwnError(Exception):
        pass

    with pytest.raises(OwnError) as caught:
        with model.trace(X):
            hidden = model.layers[0].output
            try:
                {}["missing"]
            except KeyError:
                raise OwnError(hidden.shape) from None
    assert last_line(caught.value) == "raise OwnError(hidden.shape) from None"
    assert isinstance(caught.value.__context__, KeyError)
    assert caught.value.__context__.__context__ is None


def test_exception_names_no_frame_of_the_model_or_of_this_package_behind_the_block(model):
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(X):
            model.layers[1].output
            1 / 0
    shown = traceback.extract_tb(caught.value.__traceback__)
    assert shown[-1].name == "test_" + shown[-1].name.removeprefix("test_")
    assert shown[-1].filename == __file__
    assert last_line(caught.value) == "1 / 0"
    assert caught.value.__context__ is None


def test_exception_in_the_collecting_body_ends_at_the_users_line(model):
    with pytest.raises(KeyError) as caught:
        with model.trace() as tracer:
            with tracer.invoke(X):
                hidden = model.layers[0].output.save()
            {}["missing"]
    assert last_line(caught.value) == '{}["missing"]'
    assert caught.value.__context__ is None
    assert "hidden" not in locals()


def test_exception_in_a_nested_function_shows_both_lines(model):
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(X):

            def divide(x):
                return x / 0

            model.layers[0].output
            divide(1)
    lines = [entry.line for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert lines[-2:] == ["divide(1)", "return x / 0"]


# ------------------------------------------------------------------------------- trace functions


def test_trace_functions_of_a_debugger_survive(model):
    seen = []

    def global_trace(frame, event, arg):
        return local_trace if frame.f_code.co_filename == __file__ else None

    def local_trace(frame, event, arg):
        if event == "line":
            seen.append(frame.f_lineno)
        return local_trace

    def traced():
        with model.trace(X):
            hidden = model.layers[0].output.save()
        return hidden, sys.gettrace(), sys._getframe().f_trace

    before = sys.gettrace()
    sys.settrace(global_trace)
    try:
        hidden, after, local = traced()
    finally:
        sys.settrace(before)
    first = traced.__code__.co_firstlineno
    assert hidden.shape == X.shape
    assert after is global_trace
    assert local is local_trace
    assert {first + 1, first + 2, first + 3} <= set(seen)


def test_trace_function_survives_an_error_in_the_block(model):
    def global_trace(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(global_trace)
    try:
        with pytest.raises(ZeroDivisionError):
            with model.trace(X):
                1 / 0
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is global_trace


MORE = """
def run(x):
    with model.trace() as tracer:
        with tracer.invoke(x):
            one = model[0].output.save()
        with tracer.invoke(x):
            try_it = 1
            try:
                model[0].input
                1 / 0
            except ZeroDivisionError:
                two = model[1].output.save()
    return len([one, two])
for _ in range(3):
    found = run(torch.ones(1, 2))
try:
    with model.trace(torch.ones(1, 2)):
        model[0].output
        raise KeyError
except KeyError:
    pass
print("after", found)
"""


LAST_LINE = """
import coverage, sys
data = coverage.CoverageData()
data.read()
print(max(data.lines(sys.argv[1])))
"""


@pytest.mark.slow
def test_coverage_sees_the_lines_of_a_block(tmp_path):
    pytest.importorskip("coverage")
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}{MORE}")
    done = python("-m", "coverage", "run", "--concurrency=greenlet", str(script), cwd=str(tmp_path))
    assert done.stdout == "got (1, 2)\nafter 2\n", done.stderr
    report = python("-m", "coverage", "report", "-m", "--include", str(script), cwd=str(tmp_path))
    assert "100%" in report.stdout, report.stdout
    # Nor are lines of other files taken for lines of this one.
    last = python("-c", LAST_LINE, str(script), cwd=str(tmp_path))
    assert int(last.stdout) <= len(script.read_text().splitlines()), last.stdout


# ----------------------------------------------------------------------------- several at a time


def test_threads_trace_different_models_at_once():
    found = {}
    start = threading.Barrier(4)

    def work(seed):
        model = NNsight(Net(seed))
        start.wait()
        for _ in range(5):
            with model.trace(X):
                hidden = model.layers[1].output.save()
                out = model.output.save()
        found[seed] = torch.equal(out, model._module(X)) and hidden.shape == X.shape

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_trace_of_another_model_inside_a_block(model):
    other = NNsight(Net(7))
    with model.trace(X):
        hidden = model.layers[0].output
        with other.trace(hidden):
            inner = other.layers[0].output
            saved = (inner * 2).save()
        model.layers[1].output = inner
        outer = model.layers[1].output.save()
        unsaved = inner.shape
    expected = other._module.layers[0](model._module.layers[0](X))
    assert torch.equal(saved, expected * 2)
    assert torch.equal(outer, expected)
    assert "unsaved" not in locals()


# ------------------------------------------------------------------------------- notebooks


@pytest.mark.slow
def test_block_in_an_ipython_cell_and_error_line():
    script = textwrap.dedent(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        def run(text):
            result = shell.run_cell(text)
            return result
        run("import torch, nnsight_pp\\nfrom torch import nn\\n"
            "model = nnsight_pp.NNsight(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))\\n"
            "x = torch.ones(1, 2)")
        first = run("%pprint\\n!true\\nwith model.trace(x) as tracer:\\n"
                    "    hidden = model[0].output.save()\\nhidden.shape")
        first.raise_error()
        print(tuple(first.result))
        # the same cell text again, then an edited one
        run("with model.trace(x):\\n    hidden = model[1].output.save()\\n").raise_error()
        print(shell.user_ns["hidden"].equal(shell.user_ns["model"]._module(shell.user_ns["x"])))
        bad = run("with model.trace(x):\\n    a = 1\\n    1 / 0\\n")
        import traceback
        last = traceback.extract_tb(bad.error_in_exec.__traceback__)[-1]
        print(type(bad.error_in_exec).__name__, last.lineno, last.line)
        """
    )
    done = python("-c", script, env={**os.environ, "IPYTHONDIR": "/tmp/nnsight_pp_ipython"})
    lines = done.stdout.splitlines()
    assert "(1, 2)" in lines, done.stdout + done.stderr
    assert "True" in lines
    assert lines[-1] == "ZeroDivisionError 3 1 / 0"


@pytest.mark.slow
def test_block_in_a_real_jupyter_kernel(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    cells = [
        "import torch, nnsight_pp\nfrom torch import nn\n"
        "model = nnsight_pp.NNsight(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))\n",
        "# a cell with a comment\nwith model.trace(torch.ones(1, 2)) as tracer:\n"
        "    hidden = model[0].output.save()\n    unsaved = 1\n",
        "print(tuple(hidden.shape), 'unsaved' in globals())",
        "with model.trace() as tracer:\n    with tracer.invoke(torch.ones(1, 2)):\n"
        "        one = model[0].output.save()\n    with tracer.invoke(torch.zeros(2, 2)):\n"
        "        two = model[0].output.save()\n",
        "print(tuple(one.shape), tuple(two.shape))",
    ]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    printed = [out["text"] for cell in notebook.cells for out in cell.outputs if "text" in out]
    assert printed == ["(1, 2) False\n", "(1, 2) (2, 2)\n"]


def test_save_marks_the_bound_object_only(model):
    with model.trace(X):
        pair = save((model.layers[0].output, 1))
        first, _ = pair
        (first * 2).save()
    assert len(pair) == 2
    assert "first" not in locals()
