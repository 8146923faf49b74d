"""The check of the standard names on an engine: the values of one rank's trial forward.

A trial forward runs no attention, so what goes into the projection behind it is replaced by noise:
else attention would add nothing, and a wrong name for it would not be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.rows import WholeCut
from nnsight_pp.envoys.architectures import family_of, location_of
from nnsight_pp.envoys.names_check import NamesCheck
from nnsight_pp.envoys.standard_lens import Flat
from nnsight_pp.envoys.standard_names import StandardNames, seen_at

if TYPE_CHECKING:
    from nnsight_pp.core.lens import Lens
    from nnsight_pp.core.location import Location

_CHECKED = (("", "residual_in"), ("attn", "output"), ("mlp", "output"), ("", "residual"))


@final
class NamesTrial:
    """Takes the values of a trial forward; alike on every rank that computes them.

    Args:
        root: The whole tree.
    """

    def __init__(self, root: StandardNames) -> None:
        self._places: dict[Location, list[tuple[Location, Lens]]] = {}
        self._noisy: set[Location] = set()
        self._noise = torch.Generator().manual_seed(0)
        self._family = family_of(root)
        self._check = NamesCheck(0)
        self._error = ""
        if self._family is None:
            return
        num_layers = len(root.layers)
        self._check = NamesCheck(num_layers)
        names = [(index, part, name) for index in range(num_layers) for part, name in _CHECKED]
        for index, part, name in (*names, (None, "", "final_norm")):
            seen = seen_at(root, index, part, name, Flat())
            assert seen is not None
            standard = location_of(index, part, name)
            self._places.setdefault(seen.place, []).append((standard, seen.lens))
        for index in range(num_layers):
            heads = seen_at(root, index, "attn", "z", Flat())
            if heads is not None:
                self._noisy.add(heads.place)

    def note(self, location: Location, value: Any) -> Any:
        """Take ``value``; return what the model goes on with."""
        if location in self._noisy:
            return _with_noise(value, self._noise)
        for standard, lens in self._places.get(location, ()):
            try:
                self._check.note(standard, lens.read(value, WholeCut()))
            except Exception as error:
                self._error = f"The check of it failed: {type(error).__name__}: {error}"
        return value

    def untrue(self, model: torch.nn.Module) -> dict[str, str]:
        """Return why standard names are untrue, by location, as far as this rank can tell."""
        if self._error:
            return {
                str(standard): self._error
                for listed in self._places.values()
                for standard, _ in listed
            }
        if self._family is None:
            return {}
        norm: Any = model.get_submodule(self._family.norm)
        return {**self._check.untrue_parts(), **self._check.untrue_end(norm, None, None)}


def _with_noise(value: Any, noise: torch.Generator) -> Any:
    args, kwargs = value
    like = args[0]
    random = torch.randn(like.shape, generator=noise, dtype=torch.float32).to(like)
    return (random, *args[1:]), kwargs
