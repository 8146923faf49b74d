"""Each test of this folder runs as a worker's block does: at the bottom of a greenlet.

What pytest would do with an error is then not taken for a ``try`` around the line.
"""

from __future__ import annotations

import greenlet
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if hasattr(pyfuncitem.obj, "hypothesis"):
        return None  # it calls the test itself, many times
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    greenlet.greenlet(pyfuncitem.obj).switch(**given)
    return True
