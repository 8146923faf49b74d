"""The serve points of a rank: on the modules' forwards while something is served, else gone.

In between the modules are vLLM's own, so a step without a block runs no line of ours inside the
model, compiled or not. Putting the points on and taking them off again costs one entry of a
dictionary for each module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.location import ROOT
from nnsight_pp.envoys.serve_point import install_serve_points

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    import torch

    from nnsight_pp.core.location import Location
    from nnsight_pp.envoys.gate import Gate
    from nnsight_pp.interleave.interleaver import Interleaver


@final
class Points:
    """The serve points of ``modules``, which look at ``gate``.

    Make it after anything that compiles the model: a compiler would take the points in, and drop
    what they do.

    Args:
        modules: The rank's own modules, by path.
        gate: What the points look at. Nobody else opens it.
    """

    def __init__(self, modules: dict[str, torch.nn.Module], gate: Gate) -> None:
        each = {id(module): module.__dict__ for module in modules.values()}
        own = {key: fields.get("forward") for key, fields in each.items()}
        install_serve_points(modules, gate)
        # The fields of a module, its point, and what its instance had for a forward before.
        self._places = [(fields, fields["forward"], own[key]) for key, fields in each.items()]
        paths: dict[int, list[str]] = {}
        for path, module in modules.items():
            paths.setdefault(id(module), []).append(path)
        shared = [held for held in paths.values() if len(held) > 1]
        holders = {path.rpartition(".")[0] for held in shared for path in held}
        # Of each module that is held at several paths: these, those that hold another, its point.
        self._shared = [
            (held, [path for path in held if path in holders], modules[held[0]].__dict__["forward"])
            for held in shared
        ]
        self._gate = gate
        self._is_on = True
        self.shut()

    def settle(self, ran: Container[str]) -> dict[str, str]:
        """Serve a module that is handed down under the name that the outer module has for it.

        vLLM's mixtures of experts hold `shared_expert` and hand it to the layer inside that calls
        it: there it runs under that layer's private name.

        Args:
            ran: The paths under which a trial forward has served something.

        Returns:
            The name of each module that has one now, by its other paths.
        """
        other: dict[str, str] = {}
        for paths, holding, point in self._shared:
            fired = [path for path in paths if path in ran]
            if len(fired) != 1:
                continue  # it runs in several places, each with a name of its own, or in none
            name = next(path for path in paths if _is_handed_down(path, fired[0]))
            inner = {path: name for path in paths if path != name and _is_handed_down(name, path)}
            if inner:
                other |= inner
                point.show_to(self._gate, [name], holding)
        for paths, _, _ in self._shared:  # what such a module holds goes with it
            for path in paths:
                above = next((one for one in other if path.startswith(f"{one}.")), None)
                if above is not None and path not in ran:
                    other.setdefault(path, other[above] + path.removeprefix(above))
        return other

    def open(self, serve: Callable[[Location, Any], Any], turns: Interleaver | None = None) -> None:
        """Let every module offer its values to ``serve``; with ``turns``, those that it wants."""
        self._gate.serve = serve
        if turns is not None:
            self._gate.show(turns)
        if not self._is_on:
            self._is_on = True
            for fields, point, _ in self._places:
                fields["forward"] = point

    def shut(self) -> None:
        """Serve nothing any more, and give the modules their own forwards back."""
        self._gate.close()
        if self._is_on:
            self._is_on = False
            for fields, _, own in self._places:
                if own is None:
                    del fields["forward"]
                else:
                    fields["forward"] = own


def _is_handed_down(path: str, inner: str) -> bool:
    """Whether the module that holds ``path`` also holds ``inner``, itself or further below."""
    holder = path.rpartition(".")[0]
    return path == inner or (holder != ROOT and inner.startswith(f"{holder}."))
