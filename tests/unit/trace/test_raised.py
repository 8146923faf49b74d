import traceback

import cloudpickle
import pytest

from nnsight_pp import BlockError
from nnsight_pp.core.report import Failure
from nnsight_pp.trace.clean import raise_again, without_own_frames
from nnsight_pp.trace.raised import exception_of


def failure(error, *frames):
    return Failure(type(error).__name__, str(error), cloudpickle.dumps(error), frames, 1, 3)


def test_exception_is_raised_at_the_users_lines_on_the_rank():
    line = traceback.extract_stack()[-1].lineno or 0
    error = exception_of(
        failure(ValueError("text"), (__file__, line, "outer"), ("x.py", 3, "inner"))
    )
    with pytest.raises(ValueError, match="text") as caught:
        raise error
    shown = traceback.extract_tb(caught.value.__traceback__)[-2:]
    assert [(one.filename, one.lineno, one.name) for one in shown] == [
        (__file__, line, "outer"),
        ("x.py", 3, "inner"),
    ]
    assert "line = traceback" in (shown[0].line or "")
    assert caught.value.__notes__ == [f"[raised in the block at {__file__}:{line}, on stage 1]"]


def test_exception_without_lines_names_its_stage():
    error = exception_of(failure(KeyError("name")))
    assert type(error) is KeyError
    assert error.__notes__ == ["[raised in the block on stage 1]"]


def test_exception_whose_class_does_not_load_here_is_told_in_words():
    error = exception_of(Failure("TheirError", "the text", b"no pickle", (), 0, 0))
    assert isinstance(error, BlockError)
    assert str(error) == "TheirError: the text"


def raised_in(name):
    code = compile("def f():\n    1 / 0\n", f"{name}.py", "exec")
    names = {"__name__": name}
    exec(code, names)
    return names["f"]


def test_frames_of_this_package_are_taken_out():
    def user():
        raised_in("nnsight_pp.trace.somewhere")()

    with pytest.raises(ZeroDivisionError) as caught:
        user()
    shown = traceback.extract_tb(without_own_frames(caught.value).__traceback__)
    assert shown[-1].name == "user"


def test_traceback_of_nothing_but_this_package_stays():
    try:
        raised_in("nnsight_pp.trace.somewhere")()
    except ZeroDivisionError as error:
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next
        assert without_own_frames(error).__traceback__ is error.__traceback__


def test_error_raised_again_keeps_its_context():
    def first():
        try:
            {}["missing"]
        except KeyError:
            raise ValueError("second")  # noqa: B904

    try:
        first()
    except ValueError as raised:
        kept = [raised]
    with pytest.raises(ValueError, match="second") as caught:
        try:
            1 / 0
        except ZeroDivisionError:
            raise_again(kept.pop())
    assert isinstance(caught.value.__context__, KeyError)
