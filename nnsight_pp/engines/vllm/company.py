"""How blocks' requests must be scheduled: whole, and together where they depend on each other.

The blocks of a company share their names and the objects around them, and run on one timeline
(Note [Blocks that share names] in `interleave.timeline`). That is right only while their requests
are scheduled in the same steps, from the first one to the end of each. Whether they are is read
from the scheduler's output, so all ranks find the same; where they are not, all are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nnsight_pp.core.saved import SavedSet
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from nnsight_pp.core.block import Block, Scope
    from nnsight_pp.engines.vllm.compat import Scheduled
    from nnsight_pp.engines.vllm.traced_request import TracedRequest
    from nnsight_pp.interleave.timeline import Timeline
    from nnsight_pp.interleave.worker import Worker


class Member(NamedTuple):
    """A request's place in its company; it travels with the request."""

    company: str
    index: int
    size: int


@dataclass(slots=True)
class BesideBlock:
    """One block of a company, as the names of the others see it."""

    block: Block
    scope: Scope
    frame: int
    worker: Worker

    @property
    def is_over(self) -> bool:
        """Whether it has run to its end."""
        return self.worker.has_ended


@dataclass(slots=True)
class Company:
    """Requests that depend on each other.

    Attributes:
        name: The client's name for them.
        size: How many there are.
        timeline: Runs their workers.
        members: Those that have been scheduled, by their place.
        blocks: Their blocks, once started.
        data: All blocks as bytes: the first member carries them.
        saves: What any of the blocks has saved.
        ended: The requests that the scheduler has finished.
        is_started: Whether the blocks run.
    """

    name: str
    size: int
    timeline: Timeline
    members: dict[int, TracedRequest] = field(default_factory=dict)
    blocks: list[BesideBlock] = field(default_factory=list)
    data: bytes = b""
    saves: SavedSet = field(default_factory=SavedSet)
    ended: set[str] = field(default_factory=set)
    is_started: bool = False

    def in_order(self) -> list[TracedRequest]:
        """Return the requests in the order of their blocks."""
        return [self.members[index] for index in sorted(self.members)]

    def refusal(self, scheduled: list[Scheduled], ran: str) -> ConfigurationError | None:
        """Return why these requests of a step cannot go on together, or None."""
        there = {item.request for item in scheduled}
        wanted = {one.request for one in self.in_order()} - self.ended
        if len(self.members) == self.size and there == wanted and len(_steps(scheduled)) == 1:
            return None
        preempted = "one of them was preempted or had to wait"
        return ConfigurationError(
            explain(
                f"Of {self.size} invokes that depend on each other, a step holds {len(there)}: "
                f"{preempted if self.is_started else 'the others did not fit into it'}.",
                why="Blocks that use each other's names, or one barrier, must run in the same "
                "steps.",
                todo="Build the engine with larger max_num_batched_tokens, max_num_seqs and "
                "kv_cache_memory_bytes, or use separate traces.",
                ran=ran,
            )
        )


def _steps(scheduled: list[Scheduled]) -> set[int]:
    return {item.step for item in scheduled}


def cut_prompt(prompt_len: int, item: Scheduled, ran: str) -> ConfigurationError | None:
    """Return why a request with a block cannot be served in this step, or None."""
    is_first = item.step == 0 and item.num_computed == 0
    if item.num_computed + item.num_tokens >= prompt_len + item.step and (item.step or is_first):
        return None
    return ConfigurationError(
        explain(
            f"The prompt of {prompt_len} tokens was split across steps by chunked prefill or the "
            f"prefix cache: {item.num_tokens} tokens after {item.num_computed} computed ones.",
            why="A block must never take a piece of a prompt for the whole.",
            todo="Build the engine without max_num_scheduled_tokens, or with "
            "max_num_batched_tokens of at least the longest prompt.",
            ran=ran,
        )
    )
