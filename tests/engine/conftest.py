"""An engine for a module, and the reference values that every engine is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.backends import Engine, Local
from engine.neighbours import Neighbours
from engine.table import BLOCKS
from engine.warm_start import MODULES, warm_start

if TYPE_CHECKING:
    from engine.kept_engine import KeptEngine


@pytest.fixture(scope="module", autouse=True)
def started_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines of some modules are forked from a process that has imported vLLM."""
    if f"engine/{request.path.name}" in MODULES:
        with warm_start():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def local(smollm2_path: Path) -> Local:
    """The Hugging Face model in this process."""
    return Local(str(smollm2_path))


@pytest.fixture(scope="session")
def reference(local: Local) -> Callable[[str], dict[str, Any]]:
    """Returns what a named block gives on the local engine."""
    known: dict[str, dict[str, Any]] = {}

    def values_of(name: str) -> dict[str, Any]:
        if name not in known:
            with local.context():
                known[name] = BLOCKS[name](local)
        return known[name]

    return values_of


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, smollm2_path: Path, kept_engine: KeptEngine
) -> Iterator[Engine]:
    """An engine with as many stages as the module's parameter says."""
    with kept_engine.lent(smollm2_path, request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def neighbours(engine: Engine) -> Neighbours:
    """Seven other requests for that engine."""
    return Neighbours(engine)
