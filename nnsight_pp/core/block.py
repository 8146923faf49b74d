"""A block: what stands inside the user's `with`, as source text that every rank compiles alike.

The text is the file's own lines, indentation included, and it is compiled at its own line numbers,
so a traceback on any rank shows the user's file and line, and a multi-line string keeps every
character. Where the text comes from is `trace.capture`; what the compiler must be told so that
the text means what it meant in its function is `core.meaning`.
"""

from __future__ import annotations

import ast
import io
import linecache
import re
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from nnsight_pp.core.meaning import (
    Facts,
    all_codes,
    as_in_function,
    ask_identity,
    facts_of,
    may_differ,
    refuse_leaving,
)
from nnsight_pp.core.raw_writes import WORDS
from nnsight_pp.core.sharing import needed_of, uses_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

    from nnsight_pp.core.touches import Uses

# With these a block can bind names that its text does not show.
_BIND_MORE = frozenset({"eval", "exec", "globals", "locals", "setattr", "vars"})
# Without it a block asks nothing that `ask_identity` would change; most have none.
_SAYS_IS = re.compile(r"\bis\b")
# Put into every scope by Python or by `Scope`, and bound by no block.
_OF_THE_SCOPE = frozenset({"__builtins__", "__name__"})


@dataclass(frozen=True)
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
        return self.known.code

    def code_for_stand_ins(self) -> CodeType:
        """Return `code` where names may hold objects that stand for others: see `ask_identity`."""
        return _code_for_stand_ins(self)

    def reads(self) -> frozenset[str]:
        """Return the names that the block, or anything nested in it, looks up around itself."""
        return self.known.facts.reads

    def needs(self) -> frozenset[str]:
        """Return those of `reads` that it may look up before it has bound them itself.

        A notebook cell that is run again does not take along what its last run has saved.
        """
        return _needs(self)

    def binds(self) -> frozenset[str]:
        """Return the names that the block itself binds."""
        return self.known.facts.binds

    def does_nothing(self) -> bool:
        """Whether the block is compiled to nothing, as `pass` is."""
        return self.known.facts.does_nothing

    def binds_more(self) -> bool:
        """Whether the block may bind names that `binds` cannot know."""
        return self.known.binds_more

    @cached_property
    def known(self) -> Compiled:
        """What compiling it has shown."""
        return _compiled(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what was compiled.
        return Block, tuple(getattr(self, one.name) for one in fields(self))

    def line_of(self, name: str) -> int | None:
        """Return the line that binds ``name`` last, or else mentions it last; None for none."""
        found = [
            (isinstance(node.ctx, ast.Store), node.lineno)
            for node in ast.walk(ast.parse(_text_of(self), self.filename))
            if isinstance(node, ast.Name) and node.id == name
        ]
        return max(found)[1] if found else None

    def line_naming(self, name: str) -> int | None:
        """Return the first line with the name, attribute or module ``name``; None for none."""
        for node in ast.walk(ast.parse(_text_of(self), self.filename)):
            parts = [getattr(node, part, None) for part in ("id", "attr", "name", "module")]
            if any(part and f"{part}.".startswith(f"{name}.") for part in parts):
                return getattr(node, "lineno", None)
        return None

    def uses(self) -> Uses:
        """Return what the block may do with the names around it."""
        return _uses(self)

    def show_in_tracebacks(self) -> None:
        """Let this process's tracebacks show the block's lines where it has no such file."""
        if not linecache.getlines(self.filename):
            lines = ["\n"] * (self.first_line - 1) + lines_of(self.source)
            linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)


def lines_of(text: str) -> list[str]:
    """Return the lines of ``text`` with their ends, where the compiler sees them end."""
    return io.StringIO(text).readlines()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A block as code, and what that says.

    Attributes:
        code: Its code.
        facts: What its operations say.
        binds_more: Whether it may bind names that they do not show.
        lines: Its line numbers.
        writes_raw: Whether its text may edit a tensor in a way that torch does not count.
        is_as_in_function: Whether `as_in_function` has changed it.
    """

    code: CodeType
    facts: Facts
    binds_more: bool
    lines: range
    writes_raw: bool
    is_as_in_function: bool


def _code_of(block: Block, source: str | ast.Module) -> CodeType:
    code = compile(source, block.filename, "exec", flags=block.flags, dont_inherit=True)
    return code.replace(co_name=block.name, co_qualname=block.name)


@lru_cache(maxsize=512)
def _code_for_stand_ins(block: Block) -> CodeType:
    known = block.known
    if not _SAYS_IS.search(block.source):
        return known.code
    module = ast.parse(_text_of(block), block.filename)
    if not ask_identity(module):
        return known.code
    if known.is_as_in_function:
        module.body = cast("ast.If", module.body[0]).body
        module = as_in_function(module, partial(_code_of, block), block.receiver)
    return _code_of(block, module)


@lru_cache(maxsize=512)
def _compiled(block: Block) -> Compiled:
    compiled = partial(_code_of, block)
    text = _text_of(block)
    try:
        code = compiled(text)
    except SyntaxError:
        code = None  # said below, in words of ours where we have any
    facts = None if code is None or may_differ(code) else facts_of(code)
    is_as_in_function = False
    if code is None or facts is None or facts.has_annotations:
        is_as_in_function = True
        holder = ast.parse(text, block.filename).body[0]
        assert isinstance(holder, ast.If)
        module = ast.Module(body=holder.body, type_ignores=[])
        refuse_leaving(module, block.filename, lines_of(text))
        code = compiled(as_in_function(module, compiled, block.receiver))
        facts = facts_of(code)
    # `from x import *` is compiled to an intrinsic call by some versions.
    binds_more = bool(facts.reads & _BIND_MORE) or "import *" in block.source
    lines = range(block.first_line, block.first_line + block.source.count("\n"))
    writes_raw = any(not WORDS.isdisjoint(one.co_names) for one in all_codes(code))
    return Compiled(
        code,
        facts,
        binds_more=binds_more,
        lines=lines,
        writes_raw=writes_raw,
        is_as_in_function=is_as_in_function,
    )


@lru_cache(maxsize=512)
def _uses(block: Block) -> Uses:
    return uses_of(_tree_of(block))


@lru_cache(maxsize=512)
def _needs(block: Block) -> frozenset[str]:
    facts = block.known.facts
    if block.binds_more() or not facts.reads & facts.binds:
        return facts.reads
    early = needed_of(_tree_of(block))
    # What the text does not show (a bare `super()`) is bound by no statement.
    return facts.reads - (facts.binds - early)


def _tree_of(block: Block) -> ast.Module:
    holder = ast.parse(_text_of(block), block.filename).body[0]
    assert isinstance(holder, ast.If)
    return ast.Module(body=holder.body, type_ignores=[])


def _text_of(block: Block) -> str:
    # A header one line above keeps the body's indentation and line numbers as they are.
    return "\n" * (block.first_line - 2) + "if 1:\n" + block.source


class Scope(dict[str, Any]):
    """The names that a block sees: its own, then those around it, then builtins.

    It is the block's globals, so functions defined in the block see them too. Own names win;
    what is missing is looked up in ``around``, innermost first.
    """

    __slots__ = ("_around",)

    def __init__(self, *around: Any) -> None:  # mappings of names to the user's objects
        self._around = around
        # The interpreter takes the module of a function or class from the globals' own entry.
        for names in around:
            if type(names) is dict and "__name__" in names:
                self["__name__"] = names["__name__"]
                return
        try:
            self["__name__"] = self.__missing__("__name__")
        except KeyError:
            self["__name__"] = "__main__"

    def own(self) -> dict[str, Any]:
        """Return a copy of the names that the block itself has bound so far."""
        own = dict(self)
        for name in _OF_THE_SCOPE:
            own.pop(name, None)
        return own

    def own_of(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of ``names`` that the block itself has bound so far."""
        return {name: self[name] for name in names if name in self}

    def own_name(self, name: str) -> Any:
        """Return what the block itself has bound to ``name`` so far.

        Raises:
            KeyError: It has not bound it.
        """
        if name in _OF_THE_SCOPE or name not in self:
            raise KeyError(name)
        return self[name]

    def layers(self) -> tuple[Any, ...]:
        """Return the own names of now, then what is around them, innermost first."""
        return (dict(self), *self._around)

    def __missing__(self, name: str) -> Any:
        for names in self._around:
            if name in names:  # the usual case needs no exception
                try:
                    return names[name]
                except KeyError:
                    continue
        raise KeyError(name)
