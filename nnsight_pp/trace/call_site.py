"""Tell a call that a `with` statement enters from one whose value is used.

`with model.generate(...) as tracer:` wants a tracer, `ids = model.generate(...)` wants the ids.
What comes after the call in the caller's bytecode says which it is; no source text is needed.
"""

from __future__ import annotations

import dis
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, FrameType

# Whether the call at this place is entered. Invariant: the code is kept, so its id stays its own.
_known: dict[tuple[int, int], tuple[CodeType, bool]] = {}
_MOST_KNOWN = 1000


def is_entered_by_with(frame: FrameType) -> bool:
    """Tell whether ``frame`` enters the value of the call that it makes now.

    Source: CPython 3.11 to 3.13 enter with BEFORE_WITH; 3.14 with COPY, LOAD_SPECIAL.
    """
    site = (id(frame.f_code), frame.f_lasti)
    known = _known.get(site)
    if known is not None:
        return known[1]
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    following = [
        one.opname for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti
    ][:2]
    entered = following[:1] == ["BEFORE_WITH"] or following == ["COPY", "LOAD_SPECIAL"]
    _known[site] = (frame.f_code, entered)
    return entered
