"""The reference values of the engine tier, for the same engines on devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends import Local


@pytest.fixture(scope="session")
def local(smollm2_path: Path) -> Local:
    """The Hugging Face model in this process."""
    return Local(str(smollm2_path))
