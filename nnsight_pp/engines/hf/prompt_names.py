"""The standard names on a model of transformers in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.engines.hf.names_run import has_numbers, untrue_names
from nnsight_pp.engines.hf.prompt_rows import PromptRows
from nnsight_pp.engines.hf.rotary import rotated
from nnsight_pp.envoys.local_run import LocalForest
from nnsight_pp.envoys.standard_names import StandardNames

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from nnsight_pp.engines.hf.weights import Weights
    from nnsight_pp.envoys.tree_node import TreeNode


class PromptNames(StandardNames):
    """Mixed into `LanguageModel`: one prompt's tokens of a padded batch, by standard names."""

    if TYPE_CHECKING:
        _weights: Weights

    def _layout(self) -> PromptRows:
        assert isinstance(self._forest, LocalForest)
        mask = self._forest.named.get("attention_mask")
        known: PromptRows | None = self.__dict__.get("_prompt_rows")
        if known is None or known.mask is not mask:
            known = self._prompt_rows = PromptRows(mask)
        return known

    def _rotated(
        self, attn: TreeNode, index: int, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotated(self._module, attn._module, index, q, k)

    def _run_quietly(self, node: TreeNode, *args: Any) -> Any:
        return node._module(*args)  # a block's own call is not part of the run

    def _untrue_names(self) -> Mapping[str, str]:
        """Return why standard names do not mean what they say; checked on first use."""
        weights = self._weights
        if weights.untrue is None and has_numbers(self._module):
            weights.untrue = untrue_names(self)
        return weights.untrue or {}
