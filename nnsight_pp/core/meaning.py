"""What keeps a block's text meaning what it means inside its function.

A block is compiled as the code of a module whose globals are a `Scope`. Six things differ between
that and the user's function, and are put right or refused here:

* `return`, `yield`, `await` and a `break` of an outer loop leave the block: refused in words.
* Annotations of local names are not evaluated in a function, so they are dropped here.
* `nonlocal` in a function of the block means a name of the block, which is a global here.
* A text at the head is no docstring.
* A bare `super()` finds its class and its object in the function: they are written out.
* A class body looks names up past the scope's `__missing__`, so what it reads is made global.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple

_Nested = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _operations(*names: str) -> frozenset[int]:
    """Return the operations of these ``names`` that this version of Python has."""
    return frozenset(dis.opmap[name] for name in names if name in dis.opmap)


_LOAD_NAME = _operations("LOAD_NAME")
_LOAD_GLOBAL, _STORE_GLOBAL = dis.opmap["LOAD_GLOBAL"], dis.opmap["STORE_GLOBAL"]
_LOADS = _operations("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = _operations("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")
_ABOUT_NAMES = re.compile(b"[" + re.escape(bytes(_LOADS | _STORES)) + b"]")
_DO_NOTHING = _operations("CACHE", "LOAD_CONST", "NOP", "RESUME", "RETURN_CONST", "RETURN_VALUE")
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_ANNOTATES = _operations("SETUP_ANNOTATIONS")
# Code inside a block's code that means the same here as in its function.
_PLAIN = frozenset({"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

# Made by the class statement itself.
_OF_A_CLASS = frozenset({"__annotations__", "__conditional_annotations__"})

_OF_ANNOTATIONS = _OF_A_CLASS | {"__annotate__"}

_LEAVING: dict[type[ast.AST], str] = {
    ast.Return: "`return` cannot stand in a traced block: it does not run inside this function. "
    "Save the value and return it after the `with`",
    ast.Yield: "`yield` cannot stand in a traced block. Save the value and yield it afterwards",
    ast.YieldFrom: "`yield from` cannot stand in a traced block. Put it after the `with`",
    ast.Await: "`await` cannot stand in a traced block. Await before the `with`, or after it",
    ast.AsyncFor: "`async for` cannot stand in a traced block. Put it before the `with`",
    ast.AsyncWith: "`async with` cannot stand in a traced block. Put it around the `with`",
    ast.Nonlocal: "`nonlocal` cannot stand in a traced block. Save the value instead",
    ast.Break: "`break` of a loop around the `with` cannot stand in a traced block. "
    "Save what it depends on and break after the `with`",
    ast.Continue: "`continue` of a loop around the `with` cannot stand in a traced block. "
    "Save what it depends on and continue after the `with`",
}


def may_differ(code: CodeType) -> bool:
    """Whether a block may mean something else here than in its function, annotations apart.

    Args:
        code: What its text compiles to as the body of an `if`, which has no docstring. What would
            leave it does not compile there.
    """
    return any(
        "super" in one.co_names or (one is not code and one.co_name not in _PLAIN)
        for one in all_codes(code)
    )


def refuse_leaving(module: ast.Module, filename: str, lines: list[str]) -> None:
    """Raise where the block holds a statement that would leave it.

    Raises:
        SyntaxError: At the user's line.
    """
    for node in _own_nodes(module, in_loop=False):
        message = _LEAVING.get(type(node))
        if isinstance(node, ast.comprehension) and node.is_async:
            message = _LEAVING[ast.AsyncFor]
        if message is not None:
            place = node.target if isinstance(node, ast.comprehension) else node
            assert isinstance(place, ast.stmt | ast.expr)
            line = lines[place.lineno - 1] if place.lineno <= len(lines) else ""
            raise SyntaxError(message, (filename, place.lineno, place.col_offset + 1, line))


def _own_nodes(node: ast.AST, *, in_loop: bool) -> Iterator[ast.AST]:
    """Yield ``node`` and what runs with it as part of the block, not in a function it defines.

    The `break` and `continue` of the block's own loops are left out.
    """
    if in_loop and isinstance(node, ast.Break | ast.Continue):
        return
    yield node
    if isinstance(node, _Nested):
        return
    inside = in_loop and not isinstance(node, ast.ClassDef)
    loop = node.body if isinstance(node, ast.For | ast.While) else []
    for child in ast.iter_child_nodes(node):
        yield from _own_nodes(child, in_loop=inside or child in loop)


def as_in_function(
    module: ast.Module, compiled: Callable[[ast.Module], CodeType], receiver: str = ""
) -> ast.Module:
    """Return ``module`` changed so that it means what it means inside a function.

    Args:
        module: The block. Changed in place.
        compiled: Compiles a module as the block will be.
        receiver: The first argument of the function, or an empty string.
    """
    if ast.get_docstring(module, clean=False) is not None:
        module.body[0] = ast.copy_location(ast.Pass(), module.body[0])
    module = ast.fix_missing_locations(_InFunction(receiver).visit(module))
    classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    if classes:
        reads: dict[tuple[str, int], set[str]] = {}
        for code in all_codes(compiled(module)):
            loads, stores = _names(code, _LOAD_NAME), _names(code, _STORES)
            reads.setdefault((code.co_name, code.co_firstlineno), set()).update(loads - stores)
        for node in classes:
            line = min([node.lineno, *[item.lineno for item in node.decorator_list]])
            names = sorted(reads.get((node.name, line), set()) - _OF_A_CLASS)
            if names:
                position = 1 if ast.get_docstring(node, clean=False) is not None else 0
                node.body.insert(position, ast.Global(names))
        module = ast.fix_missing_locations(module)
    return module


class _InFunction(ast.NodeTransformer):
    """Drops annotations of the block's own names; turns its functions' `nonlocal` to `global`."""

    def __init__(self, receiver: str) -> None:
        self._depth = 0
        self._receiver = receiver

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_bare = isinstance(node.func, ast.Name) and not node.args and not node.keywords
        if is_bare and node.func.id == "super" and self._receiver and not self._depth:  # type: ignore[attr-defined]
            names = ("__class__", self._receiver)
            node.args = [ast.copy_location(ast.Name(name, ast.Load()), node) for name in names]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._nested(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._nested(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # Its annotations are evaluated in a function too; its methods are functions of the block.
        node.body = [
            self.visit(item) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) else item
            for item in node.body
        ]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        # Deeper ones may mean a name of a function between them and the block.
        return ast.copy_location(ast.Global(node.names), node) if self._depth == 1 else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if self._depth:
            return node
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def _nested(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node


# The attribute of `type` that answers `a is b`, where `type` is not Python's own.
IS = "is"


def ask_identity(tree: ast.AST) -> bool:
    """Have each `a is b` and `a is not b` in ``tree`` answered by `IS`; tell if there were any.

    The operator asks no object, and one that stands for another would say what it is itself.
    Functions of a block come home with what it saves: there, the operator is what answers.
    """
    asked = _Identity()
    asked.visit(tree)
    return asked.has_any


class _Identity(ast.NodeTransformer):
    has_any = False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        self.has_any = True
        answers = ast.parse(f"getattr(type, {IS!r}, lambda one, other: one is other)", mode="eval")
        for made in ast.walk(answers):
            ast.copy_location(made, node)
        asked = ast.Call(answers.body, [node.left, *node.comparators], [])
        ast.copy_location(asked, node)
        is_not = isinstance(node.ops[0], ast.IsNot)
        return ast.copy_location(ast.UnaryOp(ast.Not(), asked) if is_not else asked, node)


def all_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and every code object nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_codes(constant)


class Facts(NamedTuple):
    """What the operations of a block's code say.

    Attributes:
        reads: Names that it, or anything nested in it, looks up as globals.
        binds: Names that it binds, those that its functions declare global included.
        does_nothing: Whether it is compiled to nothing, as `pass` is.
        has_annotations: Whether it annotates a name of its own.
    """

    reads: frozenset[str]
    binds: frozenset[str]
    does_nothing: bool
    has_annotations: bool


def facts_of(code: CodeType) -> Facts:
    """Return what the operations of ``code`` say."""
    reads: set[str] = set()
    binds: set[str] = set()
    for one in all_codes(code):
        for operation, name in _named(one):
            if operation in _LOADS:
                reads.add(name)
            elif one is code or operation == _STORE_GLOBAL:
                binds.add(name)
    done = {*code.co_code[::2]}
    annotates = not (_ANNOTATES.isdisjoint(done) and _OF_ANNOTATIONS.isdisjoint(binds))
    return Facts(frozenset(reads - _OF_A_CLASS), frozenset(binds), done <= _DO_NOTHING, annotates)


def _named(code: CodeType) -> Iterator[tuple[int, str]]:
    """Yield the operations of ``code`` that load or store a name, each with the name.

    Does what `dis.get_instructions` does, in a hundredth of its time.
    """
    data, names = code.co_code, code.co_names
    operations = data[::2]
    for found in _ABOUT_NAMES.finditer(operations):
        at = found.start()
        operation, argument, high = operations[at], data[2 * at + 1], 8
        while at and operations[at - 1] == _EXTENDED_ARG:
            at -= 1
            argument |= data[2 * at + 1] << high
            high += 8
        # Its lowest bit says something else about the call that may follow.
        yield operation, names[argument >> 1 if operation == _LOAD_GLOBAL else argument]


def _names(code: CodeType, wanted: frozenset[int]) -> set[str]:
    return {name for operation, name in _named(code) if operation in wanted}
