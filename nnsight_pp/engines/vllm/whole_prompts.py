"""vLLM's scheduler, but for a prompt that carries a block: it runs in one step, whole.

Everybody else's prompts are cut to the step's budget (`max_num_scheduled_tokens`) as vLLM cuts
them. A block must see its prompt at once: its writes into a layer's rows come before anything that
depends on them. So when prompts with blocks are next in the queue, their step's budget grows by
them, up to what the runner's buffers hold (`max_num_batched_tokens`), and what the others lose of
theirs in that step, if anything, they get in the next one.

Source: vllm 0.32.0 v1/core/sched/scheduler.py: `schedule` asks `_reserve_prefill_lookahead` how
many tokens each request gets, before it allocates anything for them.
"""

from __future__ import annotations

from typing import Any

from nnsight_pp.engines.vllm import compat

# What other requests keep of a step that grows, in tokens: a prompt that waits for memory must not
# stop those that will free it.
ROOM = 256


class WholePromptScheduler(compat.Scheduler):
    """See the module's text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = self.scheduler_config.max_num_batched_tokens
        # In a step that has grown: what is left of it, and of the others' part in it.
        self._left = self._left_for_others = 0
        self._has_grown = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does, with room for the prompts with blocks that are next."""
        wanted = self._next_whole()
        if not wanted:
            return super().schedule(*args, **kwargs)
        budget = self.max_num_scheduled_tokens
        total = min(self._most, budget + wanted)
        # Invariant: what is left here is never more than what vLLM's own loop has left.
        self._left = total
        self._left_for_others = min(budget, max(total - wanted, ROOM))
        self._has_grown, self.max_num_scheduled_tokens = True, total
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._has_grown, self.max_num_scheduled_tokens = False, budget

    def _next_whole(self) -> int:
        """Return the tokens of the prompts with blocks that are next in the queue, or 0.

        All of them, as far as they fit: blocks that share names must begin in one step.
        """
        if not self.waiting or len(self.running) >= self.max_num_active_reqs:
            return 0
        if not self._is_whole(self.waiting.peek_request()):
            return 0
        limit = self._most - (min(self.max_num_scheduled_tokens, ROOM) if self.running else 0)
        wanted = 0
        for request in self.waiting:
            if not self._is_whole(request) or (wanted and wanted + request.num_tokens > limit):
                break
            wanted += request.num_tokens
        return wanted

    def _is_whole(self, request: Any) -> bool:
        """Whether ``request`` must run in one step, and can."""
        params = request.sampling_params
        return (
            params is not None
            and bool(params.extra_args)
            and compat.PAYLOAD in params.extra_args
            and request.num_tokens <= self._most
            # These are cut by rules of their own; the ranks refuse a piece of a prompt.
            and not request.has_encoder_inputs
            and not self.need_mamba_block_aligned_split
        )

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens ``request`` gets in this step; 0 leaves it for a later one."""
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        missing = request.num_tokens - num_computed_tokens
        if not self._has_grown:
            return 0 if count < missing and self._is_whole(request) else count
        if missing > 1 and self._is_whole(request):
            count = missing if missing <= self._left else 0
        else:
            count = min(count, self._left_for_others)
            self._left_for_others -= count
        self._left -= count
        return count
