"""A block: what stands inside the user's `with`, as source text that every rank compiles alike.

The text is the file's own lines, indentation included, and it is compiled at its own line numbers,
so a traceback on any rank shows the user's file and line, and a multi-line string keeps every
character. Where the text comes from is `trace.capture`.
"""

from __future__ import annotations

import ast
import linecache
import symtable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType


@dataclass(frozen=True, slots=True)
class Block:
    """The text of a block and where it stood.

    Attributes:
        filename: As in the code object of the frame that holds the `with`.
        first_line: Line number of the first line of ``source``.
        source: The body's lines with their indentation.
        name: Name of the function that holds the `with`.
    """

    filename: str
    first_line: int
    source: str
    name: str

    def code(self) -> CodeType:
        """Return the compiled block. Names that it binds land in the scope it is run in."""
        return _compiled(self).code

    def reads(self) -> frozenset[str]:
        """Return the names that the block, or anything nested in it, looks up."""
        return _compiled(self).reads

    def binds(self) -> frozenset[str]:
        """Return the names that the block itself binds."""
        return _compiled(self).binds

    def attributes(self) -> frozenset[str]:
        """Return every attribute name that the block mentions."""
        return _compiled(self).attributes

    def show_in_tracebacks(self) -> None:
        """Let this process's tracebacks show the block's lines where it has no such file."""
        if not linecache.getlines(self.filename):
            lines = ["\n"] * (self.first_line - 1) + self.source.splitlines(keepends=True)
            linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)


@dataclass(frozen=True, slots=True)
class _Compiled:
    code: CodeType
    reads: frozenset[str]
    binds: frozenset[str]
    attributes: frozenset[str]


@lru_cache(maxsize=512)
def _compiled(block: Block) -> _Compiled:
    # A header one line above keeps the body's indentation and line numbers as they are.
    text = "\n" * (block.first_line - 2) + "if 1:\n" + block.source
    holder = ast.parse(text, block.filename).body[0]
    assert isinstance(holder, ast.If)
    module = ast.Module(body=holder.body, type_ignores=[])
    code = compile(module, block.filename, "exec", dont_inherit=True)
    code = code.replace(co_name=block.name, co_qualname=block.name)
    table = symtable.symtable(text, block.filename, "exec")
    binds = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    attributes = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    reads = {
        node.id
        for node in ast.walk(module)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            reads.add(node.target.id)
        if isinstance(node, ast.Global):
            reads.update(node.names)
    return _Compiled(code, frozenset(reads), frozenset(binds), frozenset(attributes))


class Scope(dict[str, Any]):
    """The names that a block sees: its own, then those around it, then builtins.

    It is the block's globals, so functions defined in the block see them too. Own names win;
    what is missing is looked up in ``around``, innermost first.
    """

    __slots__ = ("_around",)

    def __init__(self, *around: Any) -> None:  # mappings of names to the user's objects
        super().__init__()
        self._around = around

    def own(self) -> dict[str, Any]:
        """Return a copy of the names that the block itself has bound so far."""
        return dict(dict.items(self))

    def layers(self) -> tuple[Any, ...]:
        """Return the own names, then what is around them, innermost first."""
        return (_OwnNames(self), *self._around)

    def __missing__(self, name: str) -> Any:
        for names in self._around:
            try:
                return names[name]
            except KeyError:
                continue
        raise KeyError(name)


class _OwnNames:
    """The names of one scope alone, read as the block binds them."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __getitem__(self, name: str) -> Any:
        if not dict.__contains__(self._scope, name):
            raise KeyError(name)
        return dict.__getitem__(self._scope, name)
