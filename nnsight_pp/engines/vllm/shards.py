"""A rank's part of a weight, as the client reads and edits it between runs.

A weight is edited whole: each rank joins the parts of its stage, makes the edit on the whole, which
is that of the layer that is not split, and keeps its own part of what came out. The client makes
three calls, each of all ranks, and looks at all answers before the next one (`rank_weights`):

1. *open*: each rank says whether it can, and has its own part at hand as it was loaded;
2. *value* or *prepare*: the parts are joined, read or edited; nothing of the model changes;
3. *settle*: the prepared parts are put into their places, or forgotten.

So a refusal of one rank is one of all, no rank waits for one that has failed, and nothing is half
applied. No exception leaves a call: what an edit itself raises is the same on every rank, and is
answered.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from nnsight_pp.core.location import Location
from nnsight_pp.core.tree import on_device
from nnsight_pp.engines.vllm.layers import is_as_loaded, weight_rule, without_adapter
from nnsight_pp.engines.vllm.packing import PackingError, experts_of, replacement, unpacked
from nnsight_pp.parallel.parts import (
    ColumnGroup,
    Columns,
    PartShapeError,
    share,
    split_evenly,
)
from nnsight_pp.wire.value_codec import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nnsight_pp.parallel.joined import Parts
    from nnsight_pp.parallel.place import Place

# A method of a tensor, or an attribute of it, and what it is called with.
Step = tuple[str, tuple[Any, ...] | None, dict[str, Any]]


def followed(value: Any, steps: Sequence[Step]) -> Any:
    """Return what ``steps`` make of ``value``."""
    for name, args, kwargs in steps:
        value = getattr(value, name)
        if args is not None:
            value = value(*args, **kwargs)
    return value


class Opening(NamedTuple):
    """What a rank says of a weight before anything is done with it.

    Attributes:
        stage: The rank's.
        holds: Whether it has a part.
        refusal: Why it cannot be used, or an empty text.
        facts: How it is held; alike on the ranks of one stage.
    """

    stage: int
    holds: bool
    refusal: str
    facts: str


class _Held(NamedTuple):
    """One place of this rank in which the weight stands."""

    layer: torch.nn.Module
    name: str
    rule: Columns | None
    part: torch.Tensor
    whole: torch.Tensor  # on the meta device: the shape and dtype


@final
class Shards:
    """The weights of one rank.

    Args:
        place: Where this rank stands.
        model: Its model.
        real: Its modules by path.
        whole: Those of the unsplit model, on the meta device.
        joiner: What joins parts, where ranks split the layers.
    """

    def __init__(
        self,
        place: Place,
        model: torch.nn.Module,
        real: Mapping[str, torch.nn.Module],
        whole: Mapping[str, torch.nn.Module],
        joiner: Parts | None,
    ) -> None:
        self._place = place
        self._model = model
        self._real = real
        self._whole = whole
        self._joiner = joiner
        self._held: list[_Held] = []
        self._prepared: list[Callable[[], None]] = []

    def answer(self, wanted: bytes) -> bytes:
        """Make one of the calls; return its answer."""
        name, *args = from_bytes(wanted)
        calls = {
            "open": self._open,
            "value": self._value,
            "prepare": self._prepare,
            "settle": self._settle,
        }
        with torch.inference_mode(False), torch.no_grad():
            return calls[name](*args)

    # -- the calls -----------------------------------------------------------------------------

    def _open(self, location: Location, is_edit: bool) -> bytes:
        self._held, self._prepared = [], []
        refusal, facts = "", []
        try:
            for path, name in self._names_of(location):
                self._hold(path, name, is_edit=is_edit)
            facts = [(one.name, one.rule, one.part.shape, one.part.dtype) for one in self._held]
        except (_RefusedError, PackingError, PartShapeError) as error:
            refusal = str(error)
        except Exception as error:  # no memory, or a vLLM that is not as we know it
            refusal = f"{type(error).__name__}: {error}"
        holds = bool(self._held) or bool(refusal)
        return pickle.dumps(Opening(self._place.stage, holds, refusal, repr(facts)))

    def _value(self, steps: Sequence[Step]) -> bytes:
        if not self._held:
            return b""
        whole = self._joined(self._held[0])
        try:
            value = followed(whole, on_device(steps, whole.device))
            return to_bytes(("value", value)) if self._place.is_lead else b""
        except Exception as error:
            return _raised(error)

    def _prepare(
        self, steps: Sequence[Step], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes:
        if not self._held:
            return b""
        first = self._held[0]
        whole = self._joined(first)
        try:
            steps, args, kwargs = on_device((steps, args, kwargs), whole.device)
            view = followed(whole, steps)
            memory = whole.untyped_storage().data_ptr()
            if view.untyped_storage().data_ptr() != memory:
                raise _RefusedError("the edited tensor is a copy of the weight here")
            getattr(view, method)(*args, **kwargs)
            if (whole.shape, whole.dtype) != (first.whole.shape, first.whole.dtype):
                raise _RefusedError(f"{method} has changed its shape or dtype")
            self._prepared = [
                replacement(one.layer, one.name, self._part(one, whole)) for one in self._held
            ]
        except Exception as error:
            return _raised(error)
        return b""

    def _settle(self, is_wanted: bool) -> bytes:
        prepared, self._prepared, self._held = self._prepared, [], []
        for put in prepared if is_wanted else ():
            put()
        return b""

    # -- what a rank has ---------------------------------------------------------------------------

    def _names_of(self, location: Location) -> list[tuple[str, str]]:
        """Return every path and name that stand for the weight at ``location``, itself first."""
        path, name = location.path, location.kind
        found = [(path, name)]
        wanted = self._whole[path]._parameters.get(name)
        if wanted is not None:
            found += [
                (other, key)
                for other, module in self._whole.items()
                for key, value in module._parameters.items()
                if value is wanted and (other, key) != (path, name)
            ]
        return found

    def _hold(self, path: str, name: str, *, is_edit: bool) -> None:
        module = self._real.get(path)
        whole = getattr(self._whole[path], name)
        layer = None if module is None else without_adapter(module)
        if layer is None or not isinstance(getattr(layer, name, None), torch.Tensor):
            return
        if not is_as_loaded(layer) and experts_of(layer) is None:
            method = type(layer.quant_method).__name__
            raise _RefusedError(f"vLLM holds it in a form of its own ({method})")
        if is_edit:
            self._check_edit(layer, path, name)
        part = unpacked(layer, name).contiguous()  # no memory is needed between two collectives
        rule = self._rule_of(layer, path, name, part)
        wanted = list(whole.shape)
        if rule is not None and self._joiner is not None:
            rule.sizes_in(part, self._place.tp_size)
            wanted[rule.axis] = sum(one.share_of(self._place.tp_size) for one in rule.groups)
        if list(part.shape) != wanted:
            raise _RefusedError(
                f"this rank holds shape {list(part.shape)} of {list(whole.shape)}, and no rule "
                "says which"
            )
        self._held.append(_Held(layer, name, rule, part, whole))

    def _check_edit(self, layer: torch.nn.Module, path: str, name: str) -> None:
        """Raise where other places of the model would not follow an edit, or follow unasked."""
        parameter = layer._parameters.get(name)
        known = [self._real.get(one) for one, _ in self._names_of(Location(path, name))]
        layers = [without_adapter(one) for one in known if one is not None]
        for other, module in self._real.items():
            is_sharing = any(value is parameter for value in module._parameters.values())
            if is_sharing and not any(module is one for one in layers):
                raise _RefusedError(f"its memory is {other}'s too, which has one of its own")
            # Latent attention multiplies its projections into each other when it is loaded.
            uses = [*vars(module).values(), *module.modules()]
            if is_deferred_attention_layer(module) and any(one is layer for one in uses):
                raise _RefusedError(f"{other} has computed something of it when it was loaded")
        if hasattr(self._model, "process_weights_after_loading"):
            raise _RefusedError("the model computes something of its weights when it is loaded")

    def _rule_of(
        self, layer: torch.nn.Module, path: str, name: str, part: torch.Tensor
    ) -> Columns | None:
        num_ranks = self._place.tp_size
        if num_ranks == 1:
            return None
        whole: Any = self._whole[path]
        if isinstance(layer, RoutedExperts):
            if layer.local_num_experts != layer.global_num_experts:
                return None
            size = whole.moe_config.intermediate_size_per_partition
            pair = (ColumnGroup(size), ColumnGroup(size))
            rules = {"w13_weight": Columns(pair, 1), "w2_weight": split_evenly(size, axis=2)}
            return rules.get(name)
        return weight_rule(layer, whole, name, num_ranks, part)

    def _joined(self, held: _Held) -> torch.Tensor:
        """Return the whole weight in new memory. A collective where ranks split it."""
        whole = held.part
        if held.rule is not None and self._joiner is not None:
            whole = self._joiner.whole(held.rule, held.part)
        # Some are kept with more digits than the model has, as vLLM's bias on some CPUs.
        return whole.to(held.whole.dtype, copy=True).contiguous()

    def _part(self, held: _Held, whole: torch.Tensor) -> torch.Tensor:
        if held.rule is None:
            return whole
        return share(held.rule, whole, self._place.tp_rank, self._place.tp_size)


class _RefusedError(Exception):
    """Why a weight cannot be used: a part of a sentence."""


def _raised(error: Exception) -> bytes:
    """Return what was raised, as an answer; of a class that the client cannot have, its words."""
    if isinstance(error, (_RefusedError, PackingError)):
        return to_bytes(("refused", str(error)))
    with contextlib.suppress(Exception):
        return to_bytes(("error", error.with_traceback(None)))
    return to_bytes(("refused", f"{type(error).__name__}: {error}"))
