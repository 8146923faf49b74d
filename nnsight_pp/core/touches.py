"""What a text does to the objects behind its names: what it may put into them, or look at."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from typing import final

# Methods that put something into an object and tell nothing of it.
PUTTING = frozenset({"append", "extend", "add", "update", "save"})
_LIBRARIES = frozenset({"torch", "F", "numpy", "np", "math", "einops"})
# Methods that change it and may tell what it was.
CHANGING = frozenset(
    [
        *("insert", "pop", "popitem", "remove", "clear", "sort", "reverse", "setdefault"),
        *("discard", "difference_update", "intersection_update", "symmetric_difference_update"),
        *("appendleft", "extendleft", "popleft", "rotate", "move_to_end", "subtract"),
    ]
)


@dataclass(frozen=True, slots=True)
class Uses:
    """What a block may do with the names around it.

    Attributes:
        early: Names that it may look up before it has bound them itself.
        put: Names into whose object it may put something.
        put_by: Names with the method of their object that puts something into it, by its name.
        seen: Names whose object it may look at.
        handed: Names whose object it may hand to a function, which may do either.
        below: Names that lead to an object into which it may put something.
        called: Names with the methods of their object that it may call.
        bound: Names around it that it may bind anew.
    """

    early: frozenset[str] = frozenset()
    put: frozenset[str] = frozenset()
    put_by: frozenset[tuple[str, str]] = frozenset()
    seen: frozenset[str] = frozenset()
    handed: frozenset[str] = frozenset()
    below: frozenset[str] = frozenset()
    called: frozenset[tuple[str, str]] = frozenset()
    bound: frozenset[str] = frozenset()


def touches_of(module: ast.Module, early: frozenset[str] = frozenset()) -> Uses:
    """Return what ``module`` may do with the objects of names; ``early`` is known already."""
    touches = _Touches()
    touches.visit(module)
    return Uses(
        early,
        frozenset(touches.put),
        frozenset(touches.put_by),
        frozenset(touches.seen),
        frozenset(touches.handed),
        frozenset(touches.below),
        frozenset(touches.called),
        frozenset(touches.bound),
    )


def _root(node: ast.AST) -> str | None:
    """Return the name at the root of ``name[...][...]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _base(node: ast.AST) -> str | None:
    """Return the name at the root of ``name[...].attribute[...]``."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@final
@dataclass
class _Touches(ast.NodeVisitor):
    put: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    below: set[str] = field(default_factory=set)
    put_by: set[tuple[str, str]] = field(default_factory=set)
    called: set[tuple[str, str]] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)

    def _put_below(self, node: ast.AST) -> None:
        """Note that something is put into what ``node`` evaluates to, if a name leads to it."""
        base = _base(node)
        if base is not None and not isinstance(node, ast.Name):
            self.below.add(base)

    def visit_Global(self, node: ast.Global) -> None:
        self.bound |= set(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.bound |= set(node.names)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            self.seen.add(node.id)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        root = _root(node)
        if not isinstance(node.ctx, ast.Load):
            self._put_below(node.value)
        if root is None or isinstance(node.ctx, ast.Load):
            self.generic_visit(node)
            return
        self.put.add(root)
        self.visit(node.slice)
        if not isinstance(node.value, ast.Name):
            self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.put.add(node.value.id)
            return
        if not isinstance(node.ctx, ast.Load):
            self._put_below(node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        root = _root(node.target)
        if root is None and isinstance(node.target, ast.Attribute):
            root = _root(node.target.value)
        if root is not None:
            self.put.add(root)
            self.seen.add(root)
        self._put_below(node.target)  # what is there already may be changed itself
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            root, name = _root(node.func.value), node.func.attr
            is_own = isinstance(node.func.value, ast.Name)
            is_changed = name in CHANGING or _is_in_place(name)
            if is_changed or (name in PUTTING and name != "save"):
                self._put_below(node.func.value)
                if root is not None and is_own:
                    self.put_by.add((root, name))
            if root is not None and is_changed and not is_own:
                self.put.add(root)
            if root is not None and is_own:
                self.called.add((root, name))
            if not is_own or name not in PUTTING:
                self.visit(node.func)
        else:
            self.visit(node.func)
        if not _only_looks(node.func):
            given = [*node.args, *[one.value for one in node.keywords]]
            self.handed |= {one.id for one in given if isinstance(one, ast.Name)}
        for one in (*node.args, *node.keywords):
            self.visit(one)


def _only_looks(function: ast.expr) -> bool:
    """Whether ``function`` is one that changes none of the containers it is given."""
    if isinstance(function, ast.Name):
        return hasattr(builtins, function.id)
    if not isinstance(function, ast.Attribute):
        return False
    of = function.value
    while isinstance(of, ast.Attribute):
        of = of.value
    return function.attr in PUTTING or (isinstance(of, ast.Name) and of.id in _LIBRARIES)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("__")
