"""The engine that was started last, kept for the next module that wants one like it.

An engine starts in half a minute, so modules that want the same one run one after the other
(`SHARING`). One that is given back must be as it was when it had just started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.backends import Engine

# In the order in which they run. The kept engine ends with the last of them.
SHARING = (
    # SmolLM2 on one rank and on two stages.
    (
        "engine/test_blocks.py",
        "engine/test_requests.py",
        "engine/test_together.py",
        "examples/test_examples.py",
    ),
    # SmolLM2 on two stages, scheduled in this process.
    ("engine/test_isolation.py", "engine/test_sessions.py", "engine/test_surface.py"),
    # A tiny Qwen2 on two stages of two ranks, whose weights the last one edits.
    ("engine/test_tensor_and_stages.py", "engine/test_weights.py"),
)


def group_of(module: str) -> tuple[str, ...]:
    """Return the modules that ``module`` runs among, itself included."""
    return next((group for group in SHARING if module in group), (module,))


def put_in_order(items: list[Any], module_of: Callable[[Any], str]) -> None:
    """Move the tests of modules that share an engine behind those of the first of them."""
    places: dict[tuple[str, ...], int] = {}
    for item in items:
        places.setdefault(group_of(module_of(item)), len(places))

    def place(item: Any) -> tuple[int, int]:
        module = module_of(item)
        group = group_of(module)
        return places[group], group.index(module)

    items.sort(key=place)


class KeptEngine:
    """At most one engine, which outlives the module that asked for it.

    Args:
        start: Starts one.
        alive: Returns the names of all that this process has started and that still lives.

    Attributes:
        parts: Those of them that belong to the engine.
    """

    def __init__(self, start: Callable[..., Engine], alive: Callable[[], set[str]]) -> None:
        self._start, self._alive = start, alive
        self._engine: Engine | None = None
        self._wanted: Any = None
        self._llm: Any = None
        self._group: tuple[str, ...] = ()
        self.parts: set[str] = set()

    def begin(self, module: str) -> None:
        """Note which module runs now; end the engine if it is not for that one."""
        group = group_of(module)
        if group != self._group:
            self.end()
            self._group = group

    @contextlib.contextmanager
    def lent(
        self, path: Path, stages: int, *, is_spoiled: bool = False, **options: Any
    ) -> Iterator[Engine]:
        """Lend an engine.

        Args:
            path: The model's folder.
            stages: How many.
            is_spoiled: Whether nobody can have it afterwards.
            **options: What else `Engine` takes.
        """
        wanted = (path, stages, options)
        if self._engine is None or self._wanted != wanted:
            self.end()
            before = self._alive()
            self._engine = self._start(str(path), stages, **options)
            self._wanted, self._llm = wanted, self._engine.model._llm
            self.parts = self._alive() - before
        engine, is_good = self._engine, False
        try:
            yield engine
            if not is_spoiled and engine.model._llm is self._llm:
                assert_as_started(engine)
                is_good = True
        finally:
            if not is_good:
                self.end()

    def end(self) -> None:
        """End the engine, if there is one."""
        engine, self._engine = self._engine, None
        self._wanted = self._llm = None
        self.parts = set()
        if engine is not None:
            engine.close()


def assert_as_started(engine: Engine) -> None:
    """Fail where a module has left something in ``engine``, and empty its prefix cache."""
    engine.assert_idle()
    assert engine.model._stored.chosen(None) == [], "an edit is still stored"
    assert engine.model._llm.reset_prefix_cache(), "a request still holds cached tokens"
