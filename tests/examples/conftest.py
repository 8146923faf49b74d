"""The two engines that every example is run on, and what it prints there."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loading import opened

if TYPE_CHECKING:
    from engine.kept_engine import KeptEngine


@pytest.fixture(scope="module")
def local(smollm2_path: Path) -> Iterator[Any]:
    with opened("local", str(smollm2_path)) as model:
        yield model


@pytest.fixture(scope="module")
def two_stages(smollm2_path: Path, kept_engine: KeptEngine) -> Iterator[Any]:
    with kept_engine.lent(smollm2_path, 2) as engine:
        yield engine.model


@pytest.fixture(scope="module")
def hf(local: Any) -> Iterator[Any]:
    """The bare Hugging Face model, for what a test computes by hand."""
    with torch.no_grad():
        yield local._module


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """Returns what an example prints on an engine; each is run once."""
    known: dict[tuple[str, str], str] = {}

    def text_of(name: str, engine: str) -> str:
        if (name, engine) not in known:
            model = request.getfixturevalue(engine)
            told = io.StringIO()
            with contextlib.redirect_stdout(told), torch.enable_grad():
                importlib.import_module(name).main(model)
            known[name, engine] = told.getvalue()
        return known[name, engine]

    return text_of
