"""Rewrite a function so that each call and each assignment in it is handed over.

``h = relu(fc(x))`` becomes, in effect, ::

    h = OPS.value(2, OPS.call(1, relu, OPS.call(0, fc, x)))

where ``OPS`` is one more free variable, filled anew for each call of the function. Globals,
defaults and closure are those of the original, lines and columns too, so a traceback shows the
user's text. Nothing else about the function changes.

Names follow the text: a call is its dotted callee joined by underscores, an assignment its target;
each name is numbered in the order of execution, inner calls first.
"""

from __future__ import annotations
import __future__ as future

import ast
import copy
from collections import Counter
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.envoys.source_text import FunctionNode, function_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPS = "_nnsight_pp_operations"
# Builtins that look at the frame that calls them.
_FRAME_BOUND = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec"})


class Operation(NamedTuple):
    """One call or assignment in the text of a function."""

    name: str
    line: int
    is_call: bool


@dataclass(frozen=True, slots=True, eq=False)
class Rewritten:
    """A rewritten function, apart from what it closes over.

    Attributes:
        operations: In the order of execution, as far as the text tells.
        numbers: The number of each name in ``operations``.
        code: To be given the cells that it closes over, ``OPS`` among them.
        first_line: Line of the `def`.
        lines: The text of the function.
    """

    operations: tuple[Operation, ...]
    numbers: dict[str, int]
    code: CodeType
    first_line: int
    lines: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operations."""
        return tuple(self.numbers)

    def bound_to(self, function: FunctionType) -> Callable[[Any], FunctionType]:
        """Return what makes ``function``, rewritten, around an object that is called `OPS`."""
        code = self.code
        known = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = [known.get(name) for name in code.co_freevars]
        place = code.co_freevars.index(OPS) if OPS in code.co_freevars else None

        def around(operations: Any) -> FunctionType:
            closure = list(cells)
            if place is not None:
                closure[place] = CellType(operations)
            made = FunctionType(
                code,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                tuple(closure),  # type: ignore[arg-type]
            )
            made.__kwdefaults__ = function.__kwdefaults__
            if function.__dict__:
                made.__dict__.update(function.__dict__)
            return made

        return around


# Invariant: the code is kept, so that its id stays its own.
_known: dict[int, tuple[CodeType, Rewritten]] = {}
_MOST_KNOWN = 1000


def rewrite(function: FunctionType) -> Rewritten:
    """Return ``function`` rewritten; the same object for every function of the same code.

    Raises:
        SourceNotAvailable: Its text is not readable.

    Cost: parses the function's file, unless it was the last one.
    """
    code = function.__code__
    known = _known.get(id(code))
    if known is not None:
        return known[1]
    original, lines = function_node(function)
    node = copy.deepcopy(original)
    rewriter = _Rewriter()
    rewriter.rewrite_body(node)
    names = [one.name for one in rewriter.operations]
    first, last = original.lineno, original.end_lineno or original.lineno
    made = Rewritten(
        tuple(rewriter.operations),
        {name: number for number, name in enumerate(names)},
        _compiled(node, code),
        first,
        tuple(line.rstrip("\r\n") for line in lines[first - 1 : last]),
    )
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[id(code)] = (code, made)
    return made


# ---- names --------------------------------------------------------------------------------------


def _dotted(node: ast.expr) -> str:
    """Return the names that ``node`` is spelled with, joined; empty where it has none."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript | ast.Starred):
            node = node.value
        else:
            break
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return "_".join(reversed(parts))


# ---- the walk -----------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    """Wraps calls and assigned values. The methods are named as `ast` wants them."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._counts: Counter[str] = Counter()

    def rewrite_body(self, node: FunctionNode) -> None:
        """Rewrite what ``node`` runs when it is called, and strip what ran when it was defined."""
        if isinstance(node, ast.Lambda):
            node.body = self.visit(node.body)
        else:
            node.body = self._visit_all(node.body)
            node.decorator_list = []
            node.returns = None
            if hasattr(node, "type_params"):
                node.type_params = []  # type: ignore[attr-defined]
        arguments = node.args
        # The function is given its defaults; here they only say which arguments have one.
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [one and ast.Constant(None) for one in arguments.kw_defaults]
        for one in ast.walk(arguments):
            if isinstance(one, ast.arg):
                one.annotation = None

    def _visit_all(self, nodes: Sequence[Any]) -> list[Any]:
        return [self.visit(node) for node in nodes]

    def _wrap(self, node: ast.expr, name: str, method: str, given: list[ast.expr]) -> ast.Call:
        number = len(self.operations)
        count = self._counts[name]
        self._counts[name] += 1
        self.operations.append(Operation(f"{name}_{count}", node.lineno, method == "call"))
        names = ast.Name(OPS, ast.Load())
        target = ast.Attribute(names, method, ast.Load())
        made = ast.Call(target, [ast.Constant(number), *given], [])
        for one in (names, target, made, made.args[0]):
            ast.copy_location(one, node)
        return made

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _FRAME_BOUND:
            return node
        name = _dotted(node.func) or "call"
        made = self._wrap(node, name, "call", [node.func, *node.args])
        made.keywords = node.keywords
        return made

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target = node.targets[0]
        if len(node.targets) > 1:
            node.value = self.visit(node.value)
        elif isinstance(target, ast.Tuple | ast.List):
            self._visit_unpacked(target, node)
        else:
            node.value = self._stored(node.value, target)
        node.targets = self._visit_all(node.targets)
        return node

    def _visit_unpacked(self, target: ast.Tuple | ast.List, node: ast.Assign) -> None:
        """Name each of the values in `a, b = 1, 2`; what one call returns is left alone."""
        value = node.value
        is_literal = (
            isinstance(value, ast.Tuple | ast.List)
            and len(value.elts) == len(target.elts)
            and not any(isinstance(one, ast.Starred) for one in (*value.elts, *target.elts))
        )
        if not is_literal:
            node.value = self.visit(value)
            return
        assert isinstance(value, ast.Tuple | ast.List)
        value.elts = [
            self._stored(one, to) for one, to in zip(value.elts, target.elts, strict=True)
        ]

    def _stored(self, value: ast.expr, target: ast.expr) -> ast.expr:
        visited: ast.expr = self.visit(value)
        name = _dotted(target)
        return self._wrap(visited, name, "value", [visited]) if name else visited

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        # The annotation of a local name is never run.
        if node.value is not None:
            node.value = self._stored(node.value, node.target)
        node.target = self.visit(node.target)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        node.iter = self.visit(node.iter)
        node.target = self.visit(node.target)
        node.body = self._visit_all(node.body)
        node.orelse = self._visit_all(node.orelse)
        return node

    def _visit_comprehension(self, node: Any) -> Any:
        node.generators = self._visit_all(node.generators)
        for field in ("key", "value", "elt"):
            if hasattr(node, field):
                setattr(node, field, self.visit(getattr(node, field)))
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = _visit_comprehension  # noqa: N815
    visit_GeneratorExp = _visit_comprehension  # noqa: N815 - `ast` names them

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter = self.visit(node.iter)
        node.target = self.visit(node.target)
        node.ifs = self._visit_all(node.ifs)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        # Decorators, defaults and annotations of an inner function stay as they are.
        node.body = self._visit_all(node.body)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        node.body = self._visit_all(node.body)
        return node


# ---- the code -----------------------------------------------------------------------------------


def _compiled(node: FunctionNode, like: CodeType) -> CodeType:
    """Compile ``node`` where it finds the free variables of ``like``, and `OPS`.

    A method is compiled in a class of the same name, which gives it `__class__` and the private
    names of that class. What is defined on the way to it means what it meant before.
    """
    holder = _holder(like.co_qualname)
    free = [OPS, *like.co_freevars]
    inside: ast.stmt = ast.Expr(node) if isinstance(node, ast.Lambda) else node
    bound = holder or ("" if isinstance(node, ast.Lambda) else node.name)
    if holder:
        free = [name for name in free if name != "__class__"]
        kind = ast.parse(f"class {holder}: pass").body[0]
        assert isinstance(kind, ast.ClassDef)
        kind.body = [inside]
        inside = kind
    within: list[ast.stmt] = [inside]
    if bound:
        within.insert(0, (ast.Nonlocal if bound in free else ast.Global)([bound]))
    module = ast.parse(f"def outer({', '.join(free)}):\n def maker(): pass")
    maker = module.body[0].body[0]  # type: ignore[attr-defined]
    maker.body = within
    for one in within:
        ast.copy_location(one, node)
    ast.fix_missing_locations(module)
    flags = like.co_flags & future.annotations.compiler_flag
    code = compile(module, like.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in ("outer", "maker", *([holder] if holder else []), like.co_name):
        code = next(
            one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name
        )
    return code.replace(co_qualname=like.co_qualname)


def _holder(qualified_name: str) -> str:
    """Return the name of the class in whose body a function stands, at any depth; else nothing."""
    names = qualified_name.split(".")[:-1]
    while names and names[-1] == "<locals>":
        names = names[:-2]
    return names[-1] if names else ""
