"""A block: what stands inside the user's `with`, as source text that every rank compiles alike.

The text is the file's own lines, indentation included, and it is compiled at its own line numbers,
so a traceback on any rank shows the user's file and line, and a multi-line string keeps every
character. Where the text comes from is `trace.capture`; what the compiler must be told so that
the text means what it meant in its function is `core.meaning`.
"""

from __future__ import annotations

import ast
import dis
import io
import linecache
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.meaning import as_in_function, bound_names, read_names, refuse_leaving
from nnsight_pp.core.sharing import Uses, uses_of

if TYPE_CHECKING:
    from types import CodeType

_DO_NOTHING = frozenset({"CACHE", "LOAD_CONST", "NOP", "RESUME", "RETURN_CONST", "RETURN_VALUE"})
# Put into every scope by Python or by `Scope`, and bound by no block.
_OF_THE_SCOPE = frozenset({"__builtins__", "__name__"})


@dataclass(frozen=True, slots=True)
class Block:
    """The text of a block and where it stood.

    Attributes:
        filename: As in the code object of the frame that holds the `with`.
        first_line: Line number of the first line of ``source``.
        source: The body's lines with their indentation.
        name: Name of the function that holds the `with`.
        flags: The `from __future__` imports of the file, as flags of `compile`.
        receiver: The first argument of that function, which a bare `super()` means.
        around: The items of the `with` behind the tracer, which are entered around the run.
    """

    filename: str
    first_line: int
    source: str
    name: str
    flags: int = 0
    receiver: str = ""
    around: str = ""

    def code(self) -> CodeType:
        """Return the compiled block. Names that it binds land in the scope it is run in.

        Raises:
            SyntaxError: The block holds a statement that only its own function could run, such
                as `return`; the error stands at the user's line.
        """
        return _compiled(self).code

    def reads(self) -> frozenset[str]:
        """Return the names that the block, or anything nested in it, looks up around itself."""
        return _compiled(self).reads

    def binds(self) -> frozenset[str]:
        """Return the names that the block itself binds."""
        return _compiled(self).binds

    def does_nothing(self) -> bool:
        """Whether the block is compiled to nothing, as `pass` is."""
        return _compiled(self).does_nothing

    def attributes(self) -> frozenset[str]:
        """Return every attribute name that the block mentions."""
        return _compiled(self).attributes

    def uses(self) -> Uses:
        """Return what the block may do with the names around it."""
        return _compiled(self).uses

    def show_in_tracebacks(self) -> None:
        """Let this process's tracebacks show the block's lines where it has no such file."""
        if not linecache.getlines(self.filename):
            lines = ["\n"] * (self.first_line - 1) + lines_of(self.source)
            linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)


def lines_of(text: str) -> list[str]:
    """Return the lines of ``text`` with their ends, where the compiler sees them end."""
    return io.StringIO(text).readlines()


@dataclass(frozen=True, slots=True)
class _Compiled:
    code: CodeType
    reads: frozenset[str]
    binds: frozenset[str]
    attributes: frozenset[str]
    does_nothing: bool
    uses: Uses


@lru_cache(maxsize=512)
def _compiled(block: Block) -> _Compiled:
    # A header one line above keeps the body's indentation and line numbers as they are.
    text = "\n" * (block.first_line - 2) + "if 1:\n" + block.source
    holder = ast.parse(text, block.filename).body[0]
    assert isinstance(holder, ast.If)
    module = ast.Module(body=holder.body, type_ignores=[])
    refuse_leaving(module, block.filename, lines_of(text))
    uses = uses_of(module)
    attributes = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}

    def compiled(tree: ast.Module) -> CodeType:
        return compile(tree, block.filename, "exec", flags=block.flags, dont_inherit=True)

    code = compiled(as_in_function(module, compiled, block.receiver))
    code = code.replace(co_name=block.name, co_qualname=block.name)
    nothing = all(one.opname in _DO_NOTHING for one in dis.get_instructions(code))
    return _Compiled(
        code, read_names(code), bound_names(code), frozenset(attributes), nothing, uses
    )


class Scope(dict[str, Any]):
    """The names that a block sees: its own, then those around it, then builtins.

    It is the block's globals, so functions defined in the block see them too. Own names win;
    what is missing is looked up in ``around``, innermost first.
    """

    __slots__ = ("_around",)

    def __init__(self, *around: Any) -> None:  # mappings of names to the user's objects
        super().__init__()
        self._around = around
        # The interpreter takes the module of a function or class from the globals' own entry.
        try:
            self["__name__"] = self.__missing__("__name__")
        except KeyError:
            self["__name__"] = "__main__"

    def own(self) -> dict[str, Any]:
        """Return a copy of the names that the block itself has bound so far."""
        return {name: value for name, value in dict.items(self) if name not in _OF_THE_SCOPE}

    def own_name(self, name: str) -> Any:
        """Return what the block itself has bound to ``name`` so far.

        Raises:
            KeyError: It has not bound it.
        """
        if name in _OF_THE_SCOPE or not dict.__contains__(self, name):
            raise KeyError(name)
        return dict.__getitem__(self, name)

    def layers(self) -> tuple[Any, ...]:
        """Return the own names of now, then what is around them, innermost first."""
        return (self.own(), *self._around)

    def __missing__(self, name: str) -> Any:
        for names in self._around:
            try:
                return names[name]
            except KeyError:
                continue
        raise KeyError(name)
