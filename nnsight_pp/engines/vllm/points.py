"""The serve points of a rank: on the modules' forwards while something is served, else gone.

In between the modules are vLLM's own, so a step without a block runs no line of ours inside the
model, compiled or not. Putting the points on and taking them off again costs one entry of a
dictionary for each module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.envoys.serve_point import install_serve_points

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._gate = gate
        self._is_on = True
        self.shut()

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
