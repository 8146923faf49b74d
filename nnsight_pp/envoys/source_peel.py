"""Look through what stands around a function: methods, partials and decorators.

A decorated forward is a wrapper that calls what it closes over. The wrapper goes on running, the
function inside is the one whose operations are named; for each call the chain is built again
around the rewritten function. A wrapper that hands its function to something else (a dispatcher)
may not run it at all, so it is not looked through: it is itself the function.
"""

from __future__ import annotations

import ast
import functools
import inspect
import weakref
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.envoys.serve_point import ServePoint
from nnsight_pp.envoys.source_rewrite import Rewritten, rewrite
from nnsight_pp.envoys.source_text import function_node, not_available

if TYPE_CHECKING:
    from collections.abc import Callable

    # Puts one layer around the function inside it.
    Layer = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A function that can be called with its operations handed over.

    Attributes:
        rewritten: Its operations and its code.
    """

    rewritten: Rewritten
    _innermost: Callable[[Any], Callable[..., Any]]
    _layers: tuple[Layer, ...]

    def around(self, operations: Any) -> Callable[..., Any]:
        """Return the function for one call, whose operations go to ``operations``."""
        function = self._innermost(operations)
        for layer in self._layers:
            function = layer(function)
        return function


def body_of(called: Any, module: torch.nn.Module | None = None) -> Body:
    """Return the body of ``called``, which may be whatever Python can call.

    Args:
        called: What is called.
        module: The module whose forward it is, if it is one.

    Raises:
        SourceNotAvailable: It is not made of readable Python.
    """
    layers: list[Layer] = []
    if module is not None and "_old_forward" in vars(module) and hasattr(module, "_hf_hook"):
        called = module._old_forward
        layers.append(functools.partial(_hooked, weakref.ref(module)))
    while not isinstance(called, FunctionType):
        called, layer = _without_layer(called)
        layers.append(layer)
    while (found := _wrapped_by(called)) is not None:
        place, inner = found
        layers.append(functools.partial(_with_cell, called, place))
        called = inner
    _refuse_compiled(called)
    rewritten = rewrite(called)
    return Body(rewritten, rewritten.bound_to(called), tuple(reversed(layers)))


def _without_layer(called: Any) -> tuple[Any, Layer]:
    """Return what ``called`` calls in turn, and what puts it around that again."""
    if isinstance(called, (torch.nn.Module, ServePoint)):
        raise not_available(
            "The call of a submodule was asked for its operations.",
            "They are those of the submodule itself, which has its own place in the tree.",
            "Use the `.source` of the submodule.",
        )
    if isinstance(called, MethodType):
        return called.__func__, functools.partial(_of_owner, _reference(called.__self__))
    if isinstance(called, functools.partial):
        args, named = called.args, called.keywords
        return called.func, lambda function: functools.partial(function, *args, **named)
    own = inspect.getattr_static(type(called), "__call__", None)
    if isinstance(own, FunctionType) and not isinstance(called, type):
        _refuse_compiled(called)
        return own, functools.partial(_of_owner, lambda: called)
    name = getattr(called, "__qualname__", None) or type(called).__name__
    raise not_available(
        f"{name} has no readable source.",
        "It is not a Python function: a builtin, a class, or compiled code.",
        "Read its `.input` and `.output`.",
    )


def _reference(owner: Any) -> Callable[[], Any]:
    """Return what gives ``owner`` back; weak for a module, which holds its own body."""
    return weakref.ref(owner) if isinstance(owner, torch.nn.Module) else lambda: owner


def _of_owner(owner: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return MethodType(function, owner())


def _hooked(
    reference: Callable[[], torch.nn.Module | None], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Put accelerate's hook around ``function`` as its own wrapper of `forward` does.

    Source: accelerate 1.x hooks.py:add_hook_to_module.
    """
    module = reference()
    assert module is not None
    hook: Any = module._hf_hook

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not hook.no_grad):
            output = function(*args, **kwargs)
        return hook.post_forward(module, output)

    return forward


def _refuse_compiled(called: Any) -> None:
    if isinstance(called, torch.jit.ScriptFunction) or hasattr(
        called, "_torchdynamo_orig_callable"
    ):
        raise not_available(
            "A function compiled by torch has no operations to look at.",
            "What runs is not its Python text.",
            "Wrap the module before it is compiled.",
        )


# ---- decorators ---------------------------------------------------------------------------------


def _wrapped_by(wrapper: FunctionType) -> tuple[int, FunctionType] | None:
    """Return the function that ``wrapper`` decorates, and the cell that holds it.

    It must call it by its name. Where it does not say which of several it decorates, it must
    hand its own arguments on to it.
    """
    held: dict[str, tuple[int, FunctionType]] = {}
    names = wrapper.__code__.co_freevars
    for place, (name, cell) in enumerate(zip(names, wrapper.__closure__ or (), strict=True)):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if isinstance(value, FunctionType):
            held[name] = place, value
    if not held:
        return None
    _refuse_compiled(wrapper)
    node, _ = function_node(wrapper)
    calls = [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in held
    ]
    said = getattr(wrapper, "__wrapped__", None)
    for call in calls:
        if held[_name(call)][1] is said:
            return held[_name(call)]
    called = {_name(call) for call in calls}
    passed_on = {_name(call) for call in calls if _hands_on(node.args, call)}
    return held[passed_on.pop()] if len(called) == 1 and passed_on else None


def _name(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Name)
    return call.func.id


def _hands_on(own: ast.arguments, call: ast.Call) -> bool:
    """Tell whether ``call`` passes on exactly the arguments ``own``, in their order."""
    wanted = [one.arg for one in (*own.posonlyargs, *own.args)]
    wanted += [f"*{own.vararg.arg}"] if own.vararg else []
    given: list[str] = []
    for one in call.args:
        star = "*" if isinstance(one, ast.Starred) else ""
        value = one.value if isinstance(one, ast.Starred) else one
        given.append(f"{star}{value.id}" if isinstance(value, ast.Name) else "")
    if own.kwarg and not any(one.arg is None for one in call.keywords):
        return False
    return given == wanted


def _with_cell(wrapper: FunctionType, place: int, function: Callable[..., Any]) -> FunctionType:
    """Return ``wrapper`` around ``function``."""
    cells = list(wrapper.__closure__ or ())
    cells[place] = CellType(function)
    made = FunctionType(
        wrapper.__code__,
        wrapper.__globals__,
        wrapper.__name__,
        wrapper.__defaults__,
        tuple(cells),
    )
    made.__kwdefaults__ = wrapper.__kwdefaults__
    made.__dict__.update(wrapper.__dict__)
    return made
