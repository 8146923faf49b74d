"""What a block may share with the blocks beside it, read from its text.

Blocks of one trace depend on each other where one may look up a name before it has bound it itself,
and another binds it; or where one changes an object that another looks at. `uses_of` says what a
block may do with each name. Where the text leaves it open, the answer is yes: then the blocks are
run together, which is right for any blocks. One thing is taken for granted: a `for` loop that binds
a name runs its body, so that what it binds is the block's own afterwards.

`needed_of` says which names a block may look up around itself at all. There nothing is taken for
granted: a name that is not among them does not travel with the block.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, final

from nnsight_pp.core.touches import Uses, touches_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def uses_of(module: ast.Module) -> Uses:
    """Return what the block ``module`` may do with each name."""
    flow = _Flow()
    flow.run(module.body, set())
    return touches_of(module, frozenset(flow.early))


def needed_of(module: ast.Module) -> frozenset[str]:
    """Return the names that the block ``module`` may look up before it has surely bound them."""
    flow = _Flow(is_sure=True)
    flow.run(module.body, set())
    return frozenset(flow.early)


# ------------------------------------------------------------------------- what is looked up early


@final
class _Flow:
    """Follows a block from statement to statement with the names that are bound by then.

    Args:
        is_sure: Whether only what is surely bound counts as bound: not what the body of a loop
            binds, or that of a `with` which may go on behind an error, or an expression that may
            not be evaluated; nor what is deleted somewhere.
    """

    def __init__(self, *, is_sure: bool = False) -> None:
        self.early: set[str] = set()
        self._is_sure = is_sure

    def run(self, body: Sequence[ast.stmt], bound: set[str]) -> set[str] | None:
        """Return what is bound behind ``body``, or None where nothing runs there."""
        now: set[str] | None = set(bound)
        for statement in body:
            if now is None:
                break
            now = self._statement(statement, now)
        return now

    def _look(self, nodes: Sequence[ast.AST | None], bound: set[str]) -> None:
        for node in nodes:
            if node is None:
                continue
            if self._is_sure:
                self.early |= _mentioned(node) - bound
                continue
            given = set(_walrus(node))
            self.early |= _looked_up(node) - bound - given
            bound |= given

    def _statement(self, node: ast.stmt, bound: set[str]) -> set[str] | None:
        if isinstance(node, (ast.Break, ast.Continue)):
            return None
        if isinstance(node, ast.Raise):
            self._look([node.exc, node.cause], bound)
            return None
        if isinstance(node, ast.If):
            self._look([node.test], bound)
            return _both(self.run(node.body, bound), self.run(node.orelse, bound))
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._look([node.iter, node.target], bound)
            inside = bound | _targets(node.target)
            after = self.run(node.body, inside)
            if self._is_sure:
                self.run(node.orelse, bound)
                return bound
            behind = inside if after is None else after
            return self.run(node.orelse, behind) or behind
        if isinstance(node, ast.While):
            self._look([node.test], bound)
            self.run(node.body, bound)
            behind = self.run(node.orelse, bound)
            return bound if self._is_sure or behind is None else behind
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._look([item.context_expr, item.optional_vars], bound)
                bound |= _targets(item.optional_vars)
            after = self.run(node.body, bound)
            may_go_on = self._is_sure and not all(map(_is_of_torch, node.items))
            return bound if may_go_on else after
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self._try(node, bound)
        if isinstance(node, ast.Match):
            self._look([node.subject], bound)
            for case in node.cases:
                self._look([case.pattern], bound)
                inside = bound | _captures(case.pattern)
                self._look([case.guard], inside)
                self.run(case.body, inside)
            return bound
        return self._simple(node, bound)

    def _try(self, node: ast.Try | ast.TryStar, bound: set[str]) -> set[str] | None:
        after = self.run(node.body, bound)
        if after is not None:
            after = self.run(node.orelse, after)
        for handler in node.handlers:
            self._look([handler.type], bound)
            named = {handler.name} if handler.name else set()
            self.early |= named if self._is_sure else set()  # it is deleted at the end
            after = _both(after, self.run(handler.body, bound | named))
        last = self.run(node.finalbody, bound)
        return None if after is None or last is None else after | last

    def _simple(self, node: ast.stmt, bound: set[str]) -> set[str]:
        if isinstance(node, ast.AugAssign):
            self._look([node.value, node.target], bound)
            if isinstance(node.target, ast.Name):
                self.early |= {node.target.id} - bound
        elif isinstance(node, ast.Delete):
            names = {one.id for one in node.targets if isinstance(one, ast.Name)}
            self.early |= names if self._is_sure else names - bound
            self._look([one for one in node.targets if not isinstance(one, ast.Name)], bound)
            return bound - names
        else:
            self._look([node], bound)
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return bound
        return bound | (_targets(node) - set(_walrus(node)) if self._is_sure else _targets(node))


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and what is below it, but nothing inside a scope of its own."""
    yield node
    if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def _walrus(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.NamedExpr) and isinstance(one.target, ast.Name):
            yield one.target.id


def _mentioned(node: ast.AST) -> set[str]:
    """Return the names that ``node``, or what stands in it, looks up or may look up."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            found.add(one.id)
        elif isinstance(one, (ast.Global, ast.Nonlocal)):
            found |= set(one.names)
    return found


def _is_of_torch(item: ast.withitem) -> bool:
    """Whether it is `torch.no_grad()` or the like, which lets errors out."""
    call = item.context_expr
    of = call.func if isinstance(call, ast.Call) else None
    while isinstance(of, ast.Attribute):
        of = of.value
    return isinstance(of, ast.Name) and of.id == "torch"


def _looked_up(node: ast.AST) -> set[str]:
    """Return the names that ``node`` looks up around itself, now or when it is called."""
    found: set[str] = set()
    for one in _own_nodes(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            found.add(one.id)
        elif isinstance(one, (*_SCOPES, *_COMPREHENSIONS)):
            below = list(ast.walk(one))
            own = {
                inner.id
                for inner in below
                if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load)
            }
            own |= {inner.arg for inner in below if isinstance(inner, ast.arg)}
            declared = {
                name
                for inner in below
                if isinstance(inner, (ast.Global, ast.Nonlocal))
                for name in inner.names
            }
            loads = {
                inner.id
                for inner in below
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
            }
            # A class body looks around itself before it binds; a function does not.
            found |= loads if isinstance(one, ast.ClassDef) else loads - (own - declared)
            found |= declared
    return found


def _targets(node: ast.AST | None) -> set[str]:
    """Return the names that ``node`` binds, without those of scopes inside it."""
    if node is None:
        return set()
    found: set[str] = set()
    for one in _own_nodes(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, ast.alias):
            found.add(one.asname or one.name.partition(".")[0])
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(one.name)
    return found


def _captures(pattern: ast.AST) -> set[str]:
    found: set[str] = set()
    for one in ast.walk(pattern):
        if isinstance(one, (ast.MatchAs, ast.MatchStar)) and one.name:
            found.add(one.name)
        elif isinstance(one, ast.MatchMapping) and one.rest:
            found.add(one.rest)
    return found
