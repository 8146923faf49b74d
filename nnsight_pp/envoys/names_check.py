"""Do the standard names mean what they say on this model? Its own numbers tell.

One small forward gives the values by name. In each layer the stream must grow by what attention
and the feed-forward part add: else these two are untrue there (a model may scale what they give).
Behind the last layer the norm of the stream must be what goes to the head: else the stream is
something else. A name that fails is refused where a block uses it, so a model whose modules only
look like those of a known family is never read wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from nnsight_pp.envoys.architectures import location_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.location import Location

_GROWTH = (
    "The stream behind the layer is not the one before it plus what attention and the "
    "feed-forward part add: off by {:.2g}, where they add {:.2g}."
)
_NORM = "The norm of the stream behind the last layer is not what goes to the head."
_HEAD = "The head's logits of it are not those of the model."


@final
class NamesCheck:
    """Collects values of one forward, and says which names are untrue.

    Args:
        num_layers: How many layers the model has.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._values: dict[str, torch.Tensor] = {}

    def note(self, location: Location, value: torch.Tensor) -> None:
        """Take the value of a standard name, as it is now."""
        self._values[str(location)] = value.detach().clone()

    def value(self, location: Location) -> torch.Tensor | None:
        """Return what was noted."""
        return self._values.get(str(location))

    def untrue_parts(self) -> dict[str, str]:
        """Return which parts of layers do not add what they say, as far as values were noted."""
        found: dict[str, str] = {}
        for index in range(self._num_layers):
            parts = [location_of(index, part, "output") for part in ("attn", "mlp")]
            places = [
                location_of(index, "", "residual_in"),
                *parts,
                location_of(index, "", "residual"),
            ]
            values = [value for one in places if (value := self.value(one)) is not None]
            if len(values) == len(places) and (why := growth_error(*values)):
                found |= dict.fromkeys(map(str, parts), why)
        return found

    def untrue_end(
        self,
        norm: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor] | None,
        logits: torch.Tensor | None,
    ) -> dict[str, str]:
        """Return why the stream or `final_norm` is untrue, by location; nothing where not noted.

        Args:
            norm: Runs the last norm.
            head: Runs the head, or None where it is not called.
            logits: The model's logits of the last position, ``[1, vocabulary]``.
        """
        place = str(location_of(None, "", "final_norm"))
        normed = self.value(location_of(None, "", "final_norm"))
        stream = self.value(location_of(self._num_layers - 1, "", "residual"))
        if normed is None or stream is None:
            return {}
        if not _is_close(norm(stream), normed):
            streams = [
                location_of(index, "", name)
                for index in range(self._num_layers)
                for name in ("residual_in", "residual")
            ]
            names = [place, str(location_of(None, "", "embeddings")), *map(str, streams)]
            return dict.fromkeys(names, _NORM)
        # The model may scale or cap what its head gives, which keeps the order.
        if head is not None and logits is not None and not _has_same_best(head(normed), logits):
            return {place: _HEAD}
        return {}


def growth_error(
    before: torch.Tensor, attn: torch.Tensor, mlp: torch.Tensor, after: torch.Tensor
) -> str:
    """Return how the stream's growth differs from what was added, or an empty string."""
    if not (before.shape == attn.shape == mlp.shape == after.shape):
        shapes = [tuple(one.shape) for one in (before, attn, mlp, after)]
        return f"The stream and what is added to it have different shapes: {shapes}."
    wanted = attn.double() + mlp.double()
    off = (after.double() - before.double() - wanted).abs().max().item()
    added = wanted.abs().max().item()
    largest = max(one.abs().max().item() for one in (before, attn, mlp, after))
    rounding = torch.finfo(after.dtype).eps * largest
    # CAUTION: not a number compares false, and is an error.
    return "" if off <= 8 * rounding + 1e-3 * added else _GROWTH.format(off, added)


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    off = (found.double() - wanted.double()).abs().max().item()
    return off <= (1e-3 + 8 * torch.finfo(wanted.dtype).eps) * wanted.abs().max().item()


def _has_same_best(found: torch.Tensor, logits: torch.Tensor) -> bool:
    best = logits[-1].argmax()
    return bool((found[-1].max() - found[-1, best]).item() <= 1e-2 * found[-1].abs().max().item())
