"""The kept engine is lent again only as it was at its start, and only to the modules that share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.kept_engine import SHARING, KeptEngine, put_in_order

FIRST, SECOND = SHARING[0][0], SHARING[1][0]
PATH: Any = "a folder"


class Started:
    """An engine that leaves what a test says."""

    def __init__(self, alive: set[str], path: str, stages: int, **options: Any) -> None:
        self._alive, self.name = alive, f"{path}, {stages}, {options}"
        self.rest, self.edits, self.is_holding = 0, [], False
        self.model = SimpleNamespace(
            _llm=SimpleNamespace(reset_prefix_cache=lambda: not self.is_holding),
            _stored=SimpleNamespace(chosen=lambda _: self.edits),
        )
        alive.add(self.name)

    def assert_idle(self) -> None:
        assert not self.rest, "1 worker"

    def close(self) -> None:
        self._alive.remove(self.name)


@pytest.fixture
def alive() -> set[str]:
    return {"another process"}


@pytest.fixture
def kept(alive: set[str]) -> KeptEngine:
    def start(*args: Any, **options: Any) -> Any:
        return Started(alive, *args, **options)

    kept = KeptEngine(start, lambda: set(alive))
    kept.begin(FIRST)
    return kept


def test_it_is_lent_to_whoever_wants_the_same(kept: KeptEngine, alive: set[str]) -> None:
    with kept.lent(PATH, 2) as one:
        assert kept.parts == alive - {"another process"} != set()
    kept.begin(SHARING[0][1])
    with kept.lent(PATH, 2) as again:
        assert again is one
    with kept.lent(PATH, 2, tp=2) as other:
        assert other is not one
        assert kept.parts == alive - {"another process"} == {other.name}
    kept.end()
    assert alive == {"another process"}


def test_it_ends_when_a_module_begins_that_does_not_share(
    kept: KeptEngine, alive: set[str]
) -> None:
    with kept.lent(PATH, 2):
        pass
    kept.begin(SECOND)
    assert alive == {"another process"}
    with kept.lent(PATH, 2, is_spoiled=True):
        pass
    assert alive == {"another process"}


def leaves_a_worker(engine: Any) -> None:
    engine.rest = 1


def leaves_an_edit(engine: Any) -> None:
    engine.edits.append("an edit")


def holds_its_cache(engine: Any) -> None:
    engine.is_holding = True


@pytest.mark.parametrize("spoil", [leaves_a_worker, leaves_an_edit, holds_its_cache])
def test_a_module_that_leaves_something_fails_and_the_engine_ends(
    kept: KeptEngine, alive: set[str], spoil: Any
) -> None:
    with pytest.raises(AssertionError), kept.lent(PATH, 2) as engine:
        spoil(engine)
    assert alive == {"another process"}


def test_one_that_was_started_again_ends(kept: KeptEngine, alive: set[str]) -> None:
    with kept.lent(PATH, 2) as engine:
        engine.model._llm = None
    assert alive == {"another process"}


def test_modules_that_share_run_one_after_the_other() -> None:
    first, second, *rest = SHARING[0]
    items = [second, "unit/test_a.py", rest[0], SECOND, first, second]
    put_in_order(items, str)
    assert items == [first, second, second, rest[0], "unit/test_a.py", SECOND]
