"""Imports go down only: the contracts in pyproject.toml, run as a test."""

import subprocess
import sys
import tomllib
from pathlib import Path

from contracts.sources import PACKAGE, ROOT


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_imports_go_down_only():
    checked = lint_imports(ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_folder_has_a_layer():
    """Import-linter says so too, but only for folders with an __init__.py."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in contracts["contracts"] if c["type"] == "layers")["layers"]
    placed = {name.strip("() ") for row in layers for name in row.replace(":", "|").split("|")}
    folders = {path.parent for path in PACKAGE.glob("*/*.py")}
    assert {folder.name for folder in folders} <= placed
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
