"""Random numbers in a pipeline of threads, where each rank's generators are the same objects.

On an engine a rank is a process. Here the stages share torch's, Python's and numpy's generators, so
one stage at a time may hold them: from the moment that its worker gets the turn until it gives it
back, except while it waits for another stage.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.interleave.randomness import Kept, Randomness

_ONE_STAGE = threading.Lock()
_turn = threading.local()


class OneAtATime:
    """A `Randomness` whose turns exclude those of the other stages."""

    def __init__(self, own: Randomness) -> None:
        self._own = own

    def __enter__(self) -> None:
        _ONE_STAGE.acquire()
        self._own.__enter__()
        _turn.held_by = self

    def __exit__(self, *_: object) -> None:
        _turn.held_by = None
        self._own.__exit__()
        _ONE_STAGE.release()

    def kept(self) -> Kept:
        return self._own.kept()

    def restore(self, kept: Kept) -> None:
        self._own.restore(kept)


@contextlib.contextmanager
def without_other_turns() -> Iterator[None]:
    """Draw from the generators of the process while no other stage's worker has them."""
    if getattr(_turn, "held_by", None) is not None:
        yield
    else:
        with _ONE_STAGE:
            yield


class YieldingLink:
    """A link whose waits give the generators back."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def pull(self, *args: Any, **options: Any) -> Any:
        return YieldingAnswer(self._link.pull(*args, **options))


class YieldingAnswer:
    """An answer whose wait gives the generators back."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self) -> Any:
        holder = getattr(_turn, "held_by", None)
        if holder is None:
            return self._pending.wait()
        holder.__exit__()
        try:
            return self._pending.wait()
        finally:
            holder.__enter__()
