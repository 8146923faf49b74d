"""Hand requests to an offline engine so that they begin in one step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.engines.vllm import compat

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def paused(llm: Any) -> Iterator[None]:
    """Let an offline engine take requests in and schedule none until the end of the `with`.

    What was taken in then goes into the same step, as far as it fits. On an exception it is aborted
    before anything is scheduled.

    Source: vllm 0.32.0 entrypoints/llm.py: `enqueue_chat` names this way; `sleep(level=0)` only
    pauses the scheduler (v1/engine/core.py:pause_scheduler).
    """
    llm.sleep(level=0, mode="keep")
    try:
        yield
    except BaseException:
        compat.abort_all(llm)
        raise
    finally:
        llm.wake_up(tags=["scheduling"])


class Room(NamedTuple):
    """What the requests that wait need of one step, and what a step has."""

    prompt_tokens: list[int]
    most_tokens: int
    most_requests: int


def room_of(llm: Any) -> Room:
    """Return what fits into one step of an offline engine, and what waits for it, in order.

    Source: vllm 0.32.0 v1/engine/output_processor.py:RequestState has the length of the prompt.
    """
    engine = llm.llm_engine
    config = engine.vllm_config.scheduler_config
    lengths = [one.prompt_len for one in engine.output_processor.request_states.values()]
    return Room(lengths, config.max_num_batched_tokens, config.max_num_seqs)
