"""Hand requests to an offline engine so that they begin in one step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_pp.engines.vllm import compat
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Iterator


def generate(llm: Any, given: list[tuple[Any, Any, Any]], *, num_dependent: int) -> list[Any]:
    """Return vLLM's outputs of requests that begin in one step, as far as they fit into it.

    Those that depend on each other must. The others would be split by the moment of their arrival
    into a step of the first and one of the rest, which on several stages then often run beside each
    other to the end: 3 to 30 % slower.

    Args:
        llm: vLLM's offline engine.
        given: The prompt, the sampling parameters and the adapter of each.
        num_dependent: How many of the first ones must begin in one step.

    Raises:
        ConfigurationError: Those do not fit into one.
    """
    prompts = [prompt for prompt, _, _ in given]
    params = [of_one for _, of_one, _ in given]
    adapters = [adapter for _, _, adapter in given]
    if len(given) <= 1:
        return llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    with _paused(llm):
        llm.enqueue(prompts, params, lora_request=adapters, use_tqdm=False)
        if num_dependent:
            _check_room(_room_of(llm), num_dependent)
    return llm.wait_for_completion(use_tqdm=False)


@contextmanager
def _paused(llm: Any) -> Iterator[None]:
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


class _Room(NamedTuple):
    """What the requests that wait need of one step, and what a step has."""

    prompt_tokens: list[int]
    most_tokens: int
    most_requests: int


def _room_of(llm: Any) -> _Room:
    """Return what fits into one step of an offline engine, and what waits for it, in order.

    Source: vllm 0.32.0 v1/engine/output_processor.py:RequestState has the length of the prompt.
    """
    engine = llm.llm_engine
    config = engine.vllm_config.scheduler_config
    lengths = [one.prompt_len for one in engine.output_processor.request_states.values()]
    return _Room(lengths, config.max_num_batched_tokens, config.max_num_seqs)


def _check_room(room: _Room, num_requests: int) -> None:
    """Raise where the first ``num_requests`` that wait do not fit into one step."""
    needs = sum(room.prompt_tokens[:num_requests])
    if needs <= room.most_tokens and num_requests <= room.most_requests:
        return
    raise ConfigurationError(
        explain(
            f"{num_requests} invokes that depend on each other have {needs} tokens; a step takes "
            f"{room.most_requests} requests and {room.most_tokens} tokens.",
            why="Blocks that use each other's names, or one barrier, must run in the same steps.",
            todo="Build the engine with larger max_num_seqs and max_num_batched_tokens, or use "
            "separate traces.",
        )
    )
