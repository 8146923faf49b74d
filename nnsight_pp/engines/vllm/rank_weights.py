"""The client's way to the weights of its ranks: what reads and edits them between runs.

Three calls of all ranks each (`shards`). Their answers are compared before the next one is made, so
that either all ranks go on or none.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.location import Location
from nnsight_pp.engines.vllm.engine_weights import EngineWeight, WeightPlace
from nnsight_pp.errors import EngineError, InternalError, NotSupportedError, explain
from nnsight_pp.wire.value_codec import from_bytes, to_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from nnsight_pp.engines.vllm.shards import Opening, Step
    from nnsight_pp.envoys.tree_node import TreeNode


@final
class RankWeights:
    """The way of a client to the weights of its ranks.

    Args:
        start: Starts the engine where it is not up, and returns vLLM's offline engine.
        call: Calls a method on every rank and returns their answers.
        lock: Held by whoever runs something on the engine.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        call: Callable[..., list[Any]],
        lock: threading.RLock,  # pyright: ignore[reportGeneralTypeIssues] - a function until 3.13
    ) -> None:
        self._start = start
        self._call = call
        self._lock = lock

    def weight(self, location: Location, twin: torch.Tensor) -> EngineWeight:
        """Return the weight at ``location``, which has the shape and dtype of ``twin``."""
        is_parameter = issubclass(type(twin), torch.nn.Parameter)
        return EngineWeight(WeightPlace(self, location, is_parameter), (), twin.detach())

    def named(
        self, node: TreeNode, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, EngineWeight]]:
        """Yield what `torch.nn.Module.named_parameters` does, for the module of ``node``."""
        found = node._module.named_parameters("", recurse, remove_duplicate)
        for name, twin in found:
            path, _, own = f"{node.path}.{name}".rpartition(".")
            yield f"{prefix}.{name}" if prefix else name, self.weight(Location(path, own), twin)

    def takes(self, node: TreeNode, name: str, value: Any) -> bool:
        """Whether ``node.name = value`` ends an edit in place, such as ``node.weight *= 2``.

        Raises:
            NotSupportedError: It would put another weight into the place of a weight.
        """
        if name not in node._module._parameters:
            return False
        location = Location(node.path, name)
        if type(value) is EngineWeight and value._is(location, ()):
            return True
        raise NotSupportedError(
            explain(
                f"{location} was assigned.",
                why="It would be set on this tree, and not on the ranks.",
                todo=f"Edit it in place: `{location}[:] = value`.",
            )
        )

    def read(self, location: Location, steps: Sequence[Step]) -> Any:
        """Return what ``steps`` make of the weight at ``location``. It is the caller's own."""
        with self._lock, torch.inference_mode(False):
            self._start()
            found = None
            try:
                self._open(location, is_edit=False)
                found = self._ask(location, "value", tuple(steps))
            finally:
                self._ask(location, "settle", False)
            if found is None:
                raise InternalError(f"no rank has {location}")
            return found[1]

    def edit(
        self,
        location: Location,
        steps: Sequence[Step],
        edit: tuple[str, tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """Make an edit on every rank: a method, and what it is called with.

        Raises:
            NotSupportedError: The engine is not idle, or a rank cannot. Nothing is changed then.
            Exception: What the method raises.
        """
        if not self._lock.acquire(blocking=False):
            raise _busy(location)
        try:
            llm = self._start()
            if llm.llm_engine.has_unfinished_requests():
                raise _busy(location)
            is_ready = False
            try:
                self._open(location, is_edit=True)
                self._ask(location, "prepare", tuple(steps), *edit)
                _forget_prompts(llm)
                is_ready = True
            finally:
                self._ask(location, "settle", is_ready)
        finally:
            self._lock.release()

    def _open(self, location: Location, *, is_edit: bool) -> None:
        answers = self._call("nnsight_weight", to_bytes(("open", location, is_edit)))
        found: list[Opening] = [pickle.loads(answer) for answer in answers]
        refusals = [one.refusal for one in found if one.refusal]
        if not refusals and not any(one.holds for one in found):
            refusals = ["no rank has it"]
        of_stage: dict[int, Opening] = {}
        for one in found:
            if of_stage.setdefault(one.stage, one) != one and not refusals:
                refusals = ["the ranks of one stage hold it in different ways"]
        if refusals:
            raise _refused(location, refusals[0], is_edit=is_edit)

    def _ask(self, location: Location, name: str, *args: Any) -> Any:
        """Make one call of `Shards`; return the first answer that is not empty."""
        answers = self._call("nnsight_weight", to_bytes((name, *args)))
        found = [from_bytes(answer) for answer in answers if answer]
        for kind, value in found:
            if kind == "error":
                raise value
            if kind == "refused":
                raise _refused(location, value, is_edit=name == "prepare")
        return found[0] if found else None


def _forget_prompts(llm: Any) -> None:
    """Forget what was computed of prompts with the weights as they were.

    Source: vllm 0.32.0 entrypoints/llm.py:reset_prefix_cache, v1/engine/llm_engine.py.
    """
    has_connector = llm.llm_engine.vllm_config.kv_transfer_config is not None
    if not llm.reset_prefix_cache(reset_connector=has_connector):
        raise EngineError(
            explain(
                "vLLM did not forget the prompts that it has cached.",
                why="Some of their blocks are in use.",
                todo="Let all requests end before a weight is edited.",
            )
        )
    llm.llm_engine.reset_encoder_cache()


def _busy(location: Location) -> NotSupportedError:
    return NotSupportedError(
        explain(
            f"{location} was edited while a request was running.",
            why="A request would run with the weight as it was, and as it becomes.",
            todo="Edit weights between the runs.",
        )
    )


def _refused(location: Location, why: str, *, is_edit: bool) -> NotSupportedError:
    doing = "edited" if is_edit else "read"
    return NotSupportedError(
        explain(
            f"{location} cannot be {doing} on this engine.",
            why=f"{why[:1].upper()}{why[1:]}.",
            todo="Nothing was changed." if is_edit else "",
        )
    )
