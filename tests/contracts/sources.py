"""The package's files, read and parsed once for all contracts."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nnsight_pp"


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> tuple[Source, ...]:
    """Return every Python file of the package, sorted by path."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found.append(Source(path, text, ast.parse(text, str(path))))
    assert found, f"no files under {PACKAGE}"
    return tuple(found)
