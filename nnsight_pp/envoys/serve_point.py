"""Put serve points on modules: the instance's `forward` is replaced, once.

Not torch hooks: some engines call `forward` past them. The point offers `.input`, which is
``(args, kwargs)``, then runs the module, then offers `.output`.

A module object that stands at several paths (one rotary embedding for all layers) gets its path
from its caller: the module that holds it notes itself in `Gate.running` while it runs.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias, final

from nnsight_pp.core.location import ROOT, Location
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.skip_point import NOT_SKIPPED, replacement, with_rows_replaced
from nnsight_pp.envoys.source_calls import Offer, run_offered
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.extension import load_extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from nnsight_pp.envoys.source_peel import Body


def module_paths(root: torch.nn.Module, prefix: str = ROOT) -> dict[str, torch.nn.Module]:
    """Return every path of the tree below ``root`` with its module, shared ones at each path."""
    return {
        f"{prefix}.{name}" if name else prefix: module
        for name, module in root.named_modules(remove_duplicate=False)
    }


def install_serve_points(modules: dict[str, torch.nn.Module], gate: Gate) -> None:
    """Let every module of ``modules`` offer its values to ``gate`` as long as that lives.

    Call it once per tree, after anything that compiles the model: a point seen by a compiler is
    compiled away. A module of several trees has one point, which looks at each tree's gate.
    """
    _quicken()
    paths: dict[int, list[str]] = {}
    for path, module in modules.items():
        paths.setdefault(id(module), []).append(path)
    holders = {
        path.rpartition(".")[0] for group in paths.values() if len(group) > 1 for path in group
    }
    for path, module in modules.items():
        if paths[id(module)][0] == path:
            point = module.__dict__.get("forward")
            if not isinstance(point, ServePoint):
                if point is not None and module in _wrapped:
                    warnings.warn(
                        f"The `forward` of {path} was replaced after nnsight wrapped it: a model "
                        "that was wrapped before serves its values only from now on.",
                        UserWarning,
                        stacklevel=2,
                    )
                point = ServePoint(module)
                module.forward = point
                _wrapped.add(module)
            holding = [one for one in paths[id(module)] if one in holders]
            point.show_to(gate, paths[id(module)], holding)


# The modules that have been given a point, to tell one that has lost it from a new one.
_wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

_Pair = tuple[Location, Location]
# A view; the module's locations, where its caller does not decide; as what it holds shared modules,
# or None; its locations by the caller that decides, or None.
_Quick: TypeAlias = "tuple[_View, Location, Location, str | None, dict[str, _Pair] | None]"


@final
class _View(weakref.ref[Gate]):
    """How one tree sees a module."""

    __slots__ = ("_by_parent", "_first", "_held_as")

    def see(self, paths: list[str], holding: list[str]) -> None:
        """Take the module for what stands at ``paths``; ``holding`` of them hold shared ones."""
        pairs = {path: (Location(path, "input"), Location(path, "output")) for path in paths}
        self._first: _Pair = pairs[paths[0]]
        self._by_parent: dict[str, _Pair] = {}
        for path, pair in pairs.items() if len(paths) > 1 else ():
            # Two names under one parent are one place: the first of them.
            self._by_parent.setdefault(path.rpartition(".")[0], pair)
        self._held_as = holding[0] if holding else None

    def quick(self) -> _Quick:
        """Return what `enter` and `leave` go by, for who does the same without them."""
        return self, *self._first, self._held_as, self._by_parent or None

    def enter(self, gate: Gate) -> _Pair:
        """Return the module's locations in this call, and note that it runs."""
        pair = self._first
        if self._by_parent:
            for above in reversed(gate.running):
                if above in self._by_parent:
                    pair = self._by_parent[above]
                    break
        if self._held_as is not None:
            gate.running.append(self._held_as)
        return pair

    def leave(self, gate: Gate) -> None:
        """Note that the module's call is over."""
        if self._held_as is not None and gate.running:
            gate.running.pop()


@final
class ServePoint:
    """Stands as `forward` on one module and offers its inputs and output.

    A copy of the module, made by `copy.deepcopy` or `pickle`, has its own `forward` again.

    Attributes:
        body: What runs while a gate looks on, once the module's `.source` was touched.
    """

    # Known to csrc/serve_point.cpp by their names.
    __slots__ = (
        "__name__", "__weakref__", "_function", "_module", "_other", "_quick", "_views", "body",
    )  # fmt: skip

    def __init__(self, module: torch.nn.Module) -> None:
        # Weak, and the method unbound: the module holds this, and goes when its user drops it.
        self._module = weakref.ref(module)
        forward: Any = module.forward
        is_own = getattr(forward, "__self__", None) is module
        self._function: Any = getattr(forward, "__func__", None) if is_own else None
        # What somebody else has put in place of the module's method.
        self._other: Any = forward if self._function is None else None
        self.__name__ = getattr(forward, "__name__", "forward")
        self.body: Body | None = None
        # Replaced, never changed: a tree may be collected while the module looks through it.
        self._views: tuple[_View, ...] = ()
        self._quick: tuple[_Quick, ...] = ()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward.

        Lets `inspect.signature` see the module's signature, too (transformers looks at it).
        """
        if self._function is None:
            return self._other
        return MethodType(self._function, self._held())

    def _held(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward was dropped")
        return module

    def show_to(self, gate: Gate, paths: list[str], holding: list[str]) -> None:
        """Offer the module's values to ``gate``, under ``paths``."""
        point = weakref.ref(self)

        def drop(view: weakref.ref[Gate]) -> None:
            held = point()
            if held is not None:
                held._look_through(one for one in held._views if one is not view)

        view = _View(gate, drop)
        view.see(paths, holding)
        others = (one for one in self._views if one() is not gate)
        self._look_through((*others, view))

    def _look_through(self, views: Iterable[_View]) -> None:
        self._views = tuple(views)
        self._quick = tuple(view.quick() for view in self._views)

    # csrc/serve_point.cpp does the same, and leaves out the calls that would serve nobody.
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and serve what it takes and gives where a gate is open."""
        for view in self._views:
            gate = view()
            if gate is not None and gate.serve is not None:
                return self._served(args, kwargs)
        if self._function is None:
            return self._other(*args, **kwargs)
        return self._function(self._module(), *args, **kwargs)

    __call__ = call

    def _served(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered: list[tuple[_View, Gate, Callable[[Location, Any], Any], Location]] = []
        is_skipping = False
        try:
            for view in self._views:
                gate = view()
                if gate is None or gate.serve is None:
                    continue
                serve = gate.serve
                into, out = view.enter(gate)
                entered.append((view, gate, serve, out))
                args, kwargs = serve(into, (args, kwargs))
                is_skipping = is_skipping or gate.is_skipping
            # Only now: a block that was just served may have asked to look inside, or to skip.
            if self.body is None and not is_skipping:
                value = self.__wrapped__(*args, **kwargs)
            else:
                offers = [Offer(gate, serve, out.path) for _, gate, serve, out in entered]
                value = self._looked_into(offers, args, kwargs)
        finally:
            for view, gate, _, _ in entered:
                view.leave(gate)
        for _, _, serve, out in entered:
            value = serve(out, value)
        return value

    def _looked_into(
        self, offers: list[Offer], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value = replacement(offers)
        if value is not NOT_SKIPPED:
            return value
        if self.body is None:
            value = self.__wrapped__(*args, **kwargs)
        else:
            value = run_offered(self.body, offers, args, kwargs)
        return with_rows_replaced(offers, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        module = copy.deepcopy(self._held(), memo)
        return _forward_of(self.__wrapped__, module)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._held()
        if _is_of_class(self.__wrapped__, module):
            # A copy finds it on its class, which is all there is of it when this is read back.
            return getattr, (module, "forward")
        return _itself, (self.__wrapped__,)


@functools.cache
def _quicken() -> None:
    """Let the points of this process run compiled, unless it opts out of the extension."""
    if thread_state.load().name == "native":
        call = load_extension().point_call(ServePoint, Gate)
        ServePoint.__call__ = call  # type: ignore[method-assign]


def _itself(value: Any) -> Any:
    return value


def _is_of_class(forward: Any, module: torch.nn.Module) -> bool:
    return getattr(forward, "__func__", None) is getattr(type(module), "forward", None)


def _forward_of(forward: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """Return ``forward`` bound to ``module`` where it was bound to the module it comes from."""
    function = getattr(forward, "__func__", None)
    return forward if function is None else MethodType(function, module)
