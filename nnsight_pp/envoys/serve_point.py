"""Put serve points on modules: the instance's `forward` is replaced, once.

Not torch hooks: some engines call `forward` past them. The point offers `.input`, which is
``(args, kwargs)``, then runs the module, then offers `.output`.

A module object that stands at several paths (one rotary embedding for all layers) gets its path
from its caller: the module that holds it notes itself in `Gate.running` while it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.core.location import ROOT, Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from nnsight_pp.envoys.gate import Gate

Forward = "Callable[..., Any]"


def module_paths(root: torch.nn.Module, prefix: str = ROOT) -> dict[str, torch.nn.Module]:
    """Return every path of the tree below ``root`` with its module, shared ones at each path."""
    return {
        f"{prefix}.{name}" if name else prefix: module
        for name, module in root.named_modules(remove_duplicate=False)
    }


def install_serve_points(modules: dict[str, torch.nn.Module], gate: Gate) -> None:
    """Replace `forward` on every module of ``modules``.

    Call it once per tree, after anything that compiles the model: a point seen by a compiler is
    compiled away.
    """
    paths: dict[int, list[str]] = {}
    for path, module in modules.items():
        paths.setdefault(id(module), []).append(path)
    holders = {
        path.rpartition(".")[0] for group in paths.values() if len(group) > 1 for path in group
    }
    done: set[int] = set()
    for path, module in modules.items():
        if id(module) in done:
            continue
        done.add(id(module))
        forward = _point(module.forward, paths[id(module)], gate)
        if path in holders:
            forward = _holding(forward, path, gate)
        module.forward = forward


def _point(forward: Callable[..., Any], paths: list[str], gate: Gate) -> Callable[..., Any]:
    asked = {path: (Location(path, "input"), Location(path, "output")) for path in paths}
    only = asked[paths[0]] if len(paths) == 1 else None
    parents = {path.rpartition(".")[0]: pair for path, pair in asked.items()}

    def served(*args: Any, **kwargs: Any) -> Any:
        serve = gate.serve
        if serve is None:
            return forward(*args, **kwargs)
        if only is None:
            above = gate.running[-1] if gate.running else ""
            into, out = parents.get(above) or asked[paths[0]]
        else:
            into, out = only
        args, kwargs = serve(into, (args, kwargs))
        return serve(out, forward(*args, **kwargs))

    return _named_like(served, forward)


def _holding(forward: Callable[..., Any], path: str, gate: Gate) -> Callable[..., Any]:
    """Note ``path`` in the gate while ``forward`` runs."""

    def held(*args: Any, **kwargs: Any) -> Any:
        if gate.serve is None:
            return forward(*args, **kwargs)
        gate.running.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            gate.running.pop()

    return _named_like(held, forward)


def _named_like(wrapper: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``inspect.signature`` see the module's own signature (transformers looks at it)."""
    wrapper.__wrapped__ = forward  # type: ignore[attr-defined]
    wrapper.__name__ = getattr(forward, "__name__", "forward")
    wrapper.__doc__ = forward.__doc__
    return wrapper


def fired_paths(modules: dict[str, torch.nn.Module], run: Iterable[None]) -> set[str]:
    """Return the paths of the modules that ``run`` calls. Not for modules with serve points."""
    fired: set[str] = set()
    replaced = []
    seen: set[int] = set()
    for path, module in modules.items():
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = module.__dict__.get("forward")
        replaced.append((module, own))
        module.forward = _noting(module.forward, module, fired, modules, path)
    try:
        for _ in run:
            pass
    finally:
        for module, own in replaced:
            if own is None:
                del module.forward
            else:
                module.forward = own
    return fired


def _noting(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    fired: set[str],
    modules: dict[str, torch.nn.Module],
    path: str,
) -> Callable[..., Any]:
    same = [name for name, other in modules.items() if other is module] or [path]

    def noted(*args: Any, **kwargs: Any) -> Any:
        fired.update(same)
        return forward(*args, **kwargs)

    return _named_like(noted, forward)
