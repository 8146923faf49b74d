"""Names written into a frame, compiled and by what Python offers."""

import sys

import pytest

from nnsight_pp.trace import deliver as module
from nnsight_pp.trace.deliver import deliver, local_names


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setenv("NNSIGHT_PP_TLS_SWAP", "0")
    module._write_back.cache_clear()
    yield request.param
    module._write_back.cache_clear()


def test_locals_and_cells_of_a_function_are_bound():
    first, second = 1, 2

    def inner():
        return second

    deliver(sys._getframe(), {"first": 10, "second": 20})
    assert (first, second, inner()) == (10, 20, 20)


def _with_a_name_that_has_no_value():
    late = 1
    del late
    deliver(sys._getframe(), {"late": 5})
    return local_names(sys._getframe())


def test_a_name_that_has_no_value_gets_one():
    assert _with_a_name_that_has_no_value() == {"late": 5}


def test_a_name_that_the_function_declares_global_lands_there():
    deliver(sys._getframe(), {"of_the_module": 7})
    try:
        assert globals()["of_the_module"] == 7
    finally:
        del globals()["of_the_module"]


def _with_a_name_deleted():
    gone, other = 1, 2
    before = local_names(sys._getframe())
    del gone
    deliver(sys._getframe(), {"other": 3})
    return before, other, "gone" in local_names(sys._getframe())


def test_what_was_deleted_stays_deleted():
    assert _with_a_name_deleted() == ({"gone": 1, "other": 2}, 3, False)
