"""Modules of the user's own that a block, or what it calls, imports while it runs.

They travel as those do that the block sees as globals: each is a name of the block's message, which
no code can spell. On a rank an import finds them while the block has the turn. So the block sees
what the user has set in them, and what it changes there comes home.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nnsight_pp.wire.block_codec import is_installed, is_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.engines.vllm.told import Told

# Such names are followed by the module's own.
_MARK = "import "


def modules_in(names: dict[str, Any]) -> dict[str, ModuleType]:
    """Return the modules that travel in ``names`` to be imported, by their names."""
    return {name.removeprefix(_MARK): one for name, one in names.items() if name.startswith(_MARK)}


def with_modules(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """Return the names under which ``modules`` travel to be imported."""
    return {_MARK + name: one for name, one in modules.items()}


def own_name_of(name: str) -> str:
    """Return the name of the module that travels under ``name``; another name as it is."""
    return name.removeprefix(_MARK)


def modules_of(told: Told, package: str) -> dict[str, ModuleType]:
    """Return the user's modules that code imports which stands in ``package``, by their names."""
    found = {}
    for name in _names_of(told, package):
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and is_users(module):
            found[name] = module
    return found


def missing_of(told: Told, package: str) -> str | None:
    """Return a module of the user's that such code imports and that cannot travel, or None.

    It has not been imported here, or is the main module.
    """
    for name in _names_of(told if told.imports_texts else told._replace(texts=()), package):
        if name == "__main__":
            return name
        above = name.rpartition(".")[0]
        parent = sys.modules.get(above)
        if name in sys.modules or (above and parent is None):
            continue  # what is above a missing one is missing itself, and is told
        if above and (not is_users(parent) or hasattr(parent, name.rpartition(".")[2])):
            continue
        if _is_file_of_the_user(name):
            return name
    return None


def _names_of(told: Told, package: str) -> Iterator[str]:
    """Yield the names of modules that code may import, those above before those below."""
    for one in told.imports:
        try:
            base = importlib.util.resolve_name("." * one.level + one.name, package)
        except ImportError:
            continue  # it says so where it runs
        yield from _from_the_top(base)
        for part in one.parts:
            yield f"{base}.{part}"
    for text in told.texts:
        yield from _from_the_top(text)


def _from_the_top(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _is_file_of_the_user(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False  # the import says what is wrong
    if spec is None:
        return False
    files = [
        *(spec.submodule_search_locations or ()),
        *([spec.origin] if spec.has_location else []),
    ]
    return any(not is_installed(file) for file in files if file is not None)
