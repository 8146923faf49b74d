"""One prompt's tokens in a padded batch of this process, for the standard names.

Letters: R rows of an invoke, W tokens of the batch's longest prompt, T tokens of this prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nnsight_pp.core.rows import BatchCut
from nnsight_pp.engines.hf.beam_cut import BeamCut
from nnsight_pp.errors import RowsError, explain

if TYPE_CHECKING:
    from nnsight_pp.core.protocols import Cut


@final
class PromptRows:
    """Tensors ``[1, W, ...]`` as the rows ``[T, ...]`` of one prompt.

    Args:
        mask: The run's attention mask ``[B, W]``, or None where nothing is padded.
    """

    __slots__ = ("_rows", "mask")

    def __init__(self, mask: Any) -> None:
        self.mask = mask
        self._rows: list[list[int]] | None = None
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            with _disable_current_modes():  # a scan computes with shapes alone
                self._rows = mask.int().tolist()

    def read(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return the rows of this prompt's tokens; in a decode step one row."""
        return tensor[0, self._places(tensor, cut)]

    def write(self, tensor: torch.Tensor, rows: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return a copy of ``tensor`` with ``rows`` in it."""
        new = tensor.clone()
        new[0, self._places(tensor, cut)] = rows.to(tensor)
        return new

    def read_last(self, tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return the row of the last token."""
        return tensor[0, self._last(tensor, cut)][None]

    def write_last(self, tensor: torch.Tensor, row: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Return a copy of ``tensor`` with ``row`` for the last token."""
        new = tensor.clone()
        new[0, self._last(tensor, cut)] = row[0].to(tensor)
        return new

    def _last(self, tensor: torch.Tensor, cut: Cut) -> int:
        return range(tensor.shape[1])[self._places(tensor, cut)][-1]

    def _places(self, tensor: torch.Tensor, cut: Cut) -> slice:
        """Return which of the row's tokens are the prompt's.

        Raises:
            RowsError: The invoke has several rows, or the model computes other tokens.
        """
        if tensor.dim() < 2 or tensor.shape[0] != 1:
            _refuse(
                f"This invoke sees a value of shape {list(tensor.shape)}, which is not one "
                "prompt's.",
                "A standard value is the tokens of one prompt.",
                "Give one prompt per `tracer.invoke(...)`, and no beams.",
            )
        width = tensor.shape[1]
        is_alone = not isinstance(cut, (BatchCut, BeamCut))
        if width == 1 or (self._rows is None and is_alone):
            return slice(0, width)
        rows = self._rows
        if rows is None:
            _refuse(
                "It is not known how the prompts of this batch are padded.",
                "The run has no attention mask for each token of the batch.",
                "Run `trace` or `generate`, or this prompt alone.",
            )
        if isinstance(cut, BatchCut):
            rows = rows[cut.rows.start : cut.rows.start + cut.rows.count]
        if len(rows) != 1 or len(rows[0]) != width:
            _refuse(
                f"A forward computes {width} tokens, which are not those of the run's mask.",
                "Which of them are this prompt's, and which are padding, is not known.",
                "Generate with a cache (`use_cache=True`), without beams or an assistant.",
            )
        tokens = [place for place, is_token in enumerate(rows[0]) if is_token]
        start, end = (tokens[0], tokens[-1] + 1) if tokens else (0, 0)
        if not tokens or len(tokens) != end - start:
            _refuse(
                f"The attention mask of this prompt is {rows[0]}.",
                "A standard value has the tokens between the padding, which are all attended to.",
                "Use the values of the model's own modules.",
            )
        return slice(start, end)


def _refuse(what: str, why: str, todo: str) -> NoReturn:
    raise RowsError(explain(what, why=why, todo=todo))
