"""Edits that a block made in earlier steps, which a preempted request would lose.

vLLM drops the cache of a preempted request, and later computes all its tokens again in one step.
The block does not run again for the earlier ones, so what it changed there would be gone from the
cache that later tokens attend to: the same block would give other numbers beside other requests.
Edits that no cache has seen (behind the last attention, logits, sampled ids) are not lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from nnsight_pp.core.location import LOGITS, SAMPLES
from nnsight_pp.core.rows import TokenCut
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from nnsight_pp.core.location import Location
    from nnsight_pp.engines.vllm.compat import Scheduled
    from nnsight_pp.engines.vllm.traced_request import TracedRequest


def behind_caches(order: Sequence[Location], caching: Collection[str]) -> frozenset[Location]:
    """Return the locations of the last stage whose values reach no cache.

    Args:
        order: What a forward serves on that stage, in order.
        caching: The paths of the modules that write into a cache.
    """
    last = max((index for index, one in enumerate(order) if one.path in caching), default=None)
    return frozenset() if last is None else frozenset(order[last:]) - frozenset(order[:last])


@final
class PastEdits:
    """Which requests of this rank have been changed where a cache has seen it.

    Args:
        unseen: The locations whose values reach no cache.
    """

    def __init__(self, unseen: Iterable[Location] = ()) -> None:
        self._unseen = frozenset(unseen) | {LOGITS, SAMPLES}

    def note(self, location: Location, batch: Iterable[tuple[TracedRequest, int]]) -> None:
        """Note whose block has changed its rows of ``location``, which was served just now."""
        for traced, _ in batch:
            cut = None if traced.worker is None else traced.worker.cut
            if isinstance(cut, TokenCut) and cut.edits:
                cut.edits.clear()
                traced.has_edited |= location not in self._unseen

    def lost(self, traced: TracedRequest, item: Scheduled, ran: str) -> ConfigurationError | None:
        """Return why ``traced`` cannot go on in this step, or None."""
        if not (item.is_resumed and traced.has_edited):
            return None
        return ConfigurationError(
            explain(
                f"The request was preempted after {item.step} tokens, and its edits would be lost.",
                why="vLLM computes all tokens of a preempted request again, without the edits that "
                "the block made in earlier steps, and later tokens attend to them.",
                todo="Give the engine a larger kv_cache_memory_bytes (gpu_memory_utilization), or "
                "run fewer requests at a time.",
                ran=f"request {traced.request} | {ran}",
            )
        )
