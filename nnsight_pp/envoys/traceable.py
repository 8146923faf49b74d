"""`@traceable`: a method of the user's own `Envoy` class that runs with blocks beside it.

`with model.run(x) as tracer:` runs it with the block, `model.run(x)` plainly.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from nnsight_pp.trace.call_site import is_entered_by_with

if TYPE_CHECKING:
    from collections.abc import Callable


def traceable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``method`` be entered by a `with`, whose block then runs beside it."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.interleaver.interleaving or not is_entered_by_with(sys._getframe(1)):
            return method(self, *args, **kwargs)
        return self._tracer_of(functools.partial(method, self), args, kwargs)

    return run
