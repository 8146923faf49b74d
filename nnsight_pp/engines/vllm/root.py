"""The tree of a vLLM model, as the client and every rank see it.

`model.logits` and `model.samples` are the two values of a step that no module returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.location import LOGITS, ROOT, SAMPLES, Location
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.tree import map_leaves, own_copy
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.engine_weights import EngineWeight
from nnsight_pp.engines.vllm.tree_methods import changed, check_set, method_of, set_in_block
from nnsight_pp.envoys.envoy import Envoy, unsupported
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.standard_lens import Flat
from nnsight_pp.envoys.standard_names import StandardNames
from nnsight_pp.envoys.tree_node import Forest, TreeNode
from nnsight_pp.errors import NotSupportedError, UnknownLocationError, Where, explain
from nnsight_pp.interleave.worker import current_worker, running_worker
from nnsight_pp.parallel.lazy import LazyRemoteTensor
from nnsight_pp.parallel.pulled import OwnConstant
from nnsight_pp.parallel.split_weight import SplitWeight
from nnsight_pp.trace.tracer import BlockTracer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nnsight_pp.engines.vllm.rank_weights import RankWeights
    from nnsight_pp.envoys.renaming import Spelling
    from nnsight_pp.parallel.joined import Parts
    from nnsight_pp.parallel.parts import Columns


class VLLMTree(StandardNames, Envoy):
    """The root of a vLLM model.

    Args:
        module: The model: on the meta device, except for what this process really holds.
        load_tokenizer: Makes the tokenizer on first use.
    """

    # On a client, the way to the weights of the ranks.
    _weights: RankWeights | None = None

    def __init__(self, module: torch.nn.Module, load_tokenizer: Callable[[], Any]) -> None:
        super().__init__(module)
        # On a rank, the gate of the serve points of its modules.
        self.gate = Gate(runs_skipped=True)
        # On a rank, the paths whose weights are not what their layer says: alike on every rank.
        self.repacked: frozenset[str] = frozenset()
        # On a rank, whether requests may bring adapters.
        self.takes_adapters = False
        # On a rank, why standard names are untrue, by location: alike on every rank.
        self.untrue: Mapping[str, str] = {}
        # On a rank of several that split each layer: the weights that they split, and what joins.
        self.splits: dict[tuple[str, str], Columns] = {}
        self.joiner: Parts | None = None
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

    def _layout(self) -> Flat:
        return Flat()

    def _rotated(
        self, attn: TreeNode, index: int, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = attn._children.get("rotary_emb")
        if rotary is None:
            return q, k
        places = torch.arange(len(q), device=q.device)
        turned = self._run_quietly(rotary, places, q.flatten(1), k.flatten(1))
        return turned[0].view_as(q), turned[1].view_as(k)

    def _run_quietly(self, node: TreeNode, *args: Any) -> Any:
        # Norms and rotary embeddings of heads, which take any number of heads.
        return self._run_here(node, (args, {}))

    def _untrue_names(self) -> Mapping[str, str]:
        return self.untrue

    # -- what this engine does not do --------------------------------------------------------------

    def _new_forest(self, spelling: Spelling) -> Forest:
        # A stage may hold one of two places of a module only.
        return Forest(spelling, is_split=True)

    def _install(self) -> None:
        pass  # a rank puts serve points on what it really holds

    def _trace_from(self, node: Envoy, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise unsupported(
            f"{node.path}.trace was called.",
            _line(),
            "runs only the whole model",
            "Trace the model",
        )

    def scan(self, *_: Any, **__: Any) -> Any:
        """Refuse: an engine cannot run without its weights."""
        raise unsupported(
            "scan is unavailable on vLLM.",
            None,
            "runs kernels that know nothing of tensors without elements",
            "Look at shapes in a trace, or scan a `LanguageModel` of the same checkpoint",
        )

    def _will_skip(self, location: Location) -> None:
        self.gate.is_skipping = True  # until the step is over

    def _gate_of_sources(self) -> Gate:
        raise unsupported(
            "`.source` was asked for.",
            _line(),
            "runs no rewritten forwards",
            "Read the module's `.input` and `.output`",
        )

    def _call_with_hooks(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise unsupported(
            f"{node.path} was called with hook=True.",
            _line(),
            "names each value by its step, and the call would make a second one of the same name",
            "Leave `hook` out",
        )

    # -- what a block may do beside reading values -----------------------------------------------

    def _attribute_of(self, node: Envoy, name: str, value: Any) -> Any:
        """Give a block a weight as a value of its own: pulled when it is used, never shared."""
        worker = running_worker()
        if not isinstance(value, torch.Tensor):
            return method_of(node, name, value, None if worker else self._weights, _line())
        if worker is None:
            return self._weight_outside(node, name, value)
        assert worker.turns is not None
        if node.path in self.repacked:
            raise NotSupportedError(
                explain(
                    f"vLLM has repacked {node.path}.{name} for this device.",
                    where=worker.where(),
                    why="Its CPU backend packs the weights of linear layers and drops them.",
                    todo="Clone it before the trace, `weight = model....weight.clone()`, or run on "
                    "a GPU.",
                )
            )
        location = Location(node.path, name)
        ask = worker.turns.constant(worker, location)
        source = OwnConstant(location, value.detach()) if ask is None else ask
        rule = self.splits.get((node.path, name))
        if rule is not None and self.joiner is not None:
            whole, together = self.joiner.whole, worker.turns.agreement
            source = SplitWeight(
                source,
                lambda part: together.call(worker, location, None, lambda: whole(rule, part)),
            )
        return LazyRemoteTensor(source, lambda: _shared_weight(location, worker.where()))

    def _weight_outside(self, node: TreeNode, name: str, value: torch.Tensor) -> Any:
        """Return what a weight is outside of a block: on the client, a way to that of the ranks."""
        if not value.is_meta:
            return value
        if self._weights is None or name not in {
            **node._module._parameters,
            **node._module._buffers,
        }:
            return _shape_only(value)
        return self._weights.weight(Location(node.path, name), value)

    def _will_change(self, node: TreeNode, name: str) -> None:
        raise changed(node, name, _line())

    def _takes(self, node: Envoy, name: str, value: Any) -> bool:
        """Refuse what would only be set on the tree; in a block all, as requests share it."""
        worker = running_worker()
        if worker is not None:
            raise set_in_block(node, name, worker.where())
        if self._weights is not None and self._weights.takes(node, name, value):
            return True
        check_set(node, name, value)
        return False

    def _call_from_block(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``node`` on the stage that holds it; nothing in the call is served."""
        worker = current_worker(node.path)
        assert worker.turns is not None
        if compat.has_cache(node._module):
            raise NotSupportedError(
                explain(
                    f"{node.path}, which holds attention, was called inside a block.",
                    where=worker.where(),
                    why="It would write into the cache that the running requests attend to.",
                    todo="Call modules without attention: norms, projections, the head.",
                )
            )
        if self.takes_adapters and compat.may_hold_adapter(node._module):
            raise NotSupportedError(
                explain(
                    f"{node.path} was called inside a block on an engine with LoRA adapters.",
                    where=worker.where(),
                    why="Its layers look up the adapter of each row of the running batch, and the "
                    "rows of a call are others.",
                    todo="Call norms and the like, or use an engine without enable_lora.",
                )
            )
        return worker.turns.call(
            worker, node.path, (args, kwargs), lambda given: self._run(node, given)
        )

    def _run(self, node: TreeNode, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Run the module of ``node`` on whole values; return the whole of what it gives.

        Where ranks split the layers, it is a collective.
        """
        if self.joiner is None:
            return self._run_here(node, given)
        part = self.joiner.arguments(Location(node.path, "input"), given)
        return self.joiner.result(Location(node.path, "output"), self._run_here(node, part))

    def _run_here(self, node: TreeNode, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Run the module of ``node`` on copies, with the serve points off."""
        args, kwargs = map_leaves(given, _argument)
        gate = self.gate
        serve, gate.serve = gate.serve, None
        try:
            # Not inference mode: the block may edit what it gets.
            with torch.no_grad(), compat.run_eagerly():
                return node._module(*args, **kwargs)
        finally:
            gate.serve = serve


def _shape_only(value: torch.Tensor) -> torch.Tensor:
    """Return what a weight looks like outside of a block: torch refuses to edit it.

    Nothing would come of an edit, as the weights are on the ranks.
    """
    with torch.inference_mode():
        return torch.empty_like(value)


def _shared_weight(location: Location, where: Where | None) -> NotSupportedError:
    return NotSupportedError(
        explain(
            f"{location} was edited inside a block.",
            where=where,
            why="The weights of an engine are shared by every request.",
            todo="Edit it between the traces, outside of any block; in a block, edit a copy, "
            "`weight = weight.clone()`, or what the module takes and gives.",
        )
    )


def _line() -> Where | None:
    worker = running_worker()
    return None if worker is None else worker.where()


def _argument(leaf: Any) -> Any:
    """Return what a module takes in place of ``leaf``: a kernel may overwrite its arguments."""
    if issubclass(type(leaf), Envoy):
        return leaf._module
    return own_copy(leaf)


def name_of(root: Envoy, obj: Any) -> tuple[str, str] | None:
    """Return what travels in place of ``obj``, which exists on both sides, or None.

    Raises:
        UnknownLocationError: ``obj`` is a node of another model.
        NotSupportedError: It is a weight that the client took outside of the block.
    """
    if type(obj) is EngineWeight:
        raise obj.left_outside()
    if issubclass(type(obj), RemoteValue):
        return None  # it would move bytes to say what it is
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
