"""The tree of a vLLM model, as the client and every rank see it.

`model.logits` and `model.samples` are the two values of a step that no module returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.location import LOGITS, ROOT, SAMPLES
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.errors import NotSupportedError, UnknownLocationError, explain
from nnsight_pp.interleave.worker import running_worker
from nnsight_pp.trace.tracer import BlockTracer

if TYPE_CHECKING:
    from collections.abc import Callable


class VLLMTree(Envoy):
    """The root of a vLLM model.

    Args:
        module: The model: on the meta device, except for what this process really holds.
        load_tokenizer: Makes the tokenizer on first use.
    """

    def __init__(self, module: torch.nn.Module, load_tokenizer: Callable[[], Any]) -> None:
        super().__init__(module)
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None

    @property
    def logits(self) -> Any:
        """The step's logits before sampling, ``[1, vocabulary]``. Writable."""
        return self._read(LOGITS)

    @logits.setter
    def logits(self, value: Any) -> None:
        self._write(LOGITS, value)

    @property
    def samples(self) -> Any:
        """The id sampled in the step, ``[1, 1]``. Writing it forces the token."""
        return self._read(SAMPLES)

    @samples.setter
    def samples(self, value: Any) -> None:
        self._write(SAMPLES, value)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def _attribute_of(self, node: Envoy, name: str, value: Any) -> Any:
        """Refuse weights in a block: a rank holds only its own, and some only as meta tensors."""
        if isinstance(value, torch.Tensor) and (worker := running_worker()) is not None:
            raise NotSupportedError(
                explain(
                    f"The weight {node.path}.{name} was read inside a block.",
                    where=worker.where(),
                    why="Weights of a sharded model are not served to blocks yet.",
                    todo="Compute with values of the model, or bring your own tensor along.",
                )
            )
        return value


def name_of(root: Envoy, obj: Any) -> tuple[str, str] | None:
    """Return what travels in place of ``obj``, which exists on both sides, or None.

    Raises:
        UnknownLocationError: ``obj`` is a node of another model.
    """
    if isinstance(obj, Envoy):
        if obj.root is not root:
            raise UnknownLocationError(
                explain(
                    f"The block uses {obj.path} of another model.",
                    why="A block runs beside one model.",
                    todo="Save the value of the other model first, and use the saved value.",
                )
            )
        return "node", obj.path
    if isinstance(obj, BlockTracer):
        return "tracer", ""
    return None


def object_of(root: Envoy, name: tuple[str, str]) -> Any:
    """Return what `name_of` named, on this side."""
    kind, path = name
    if kind == "tracer":
        return BlockTracer()
    return root if path == ROOT else root.get(path.removeprefix(f"{ROOT}."))
