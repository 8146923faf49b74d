"""A prompt's sequences (`n` of them), each with a worker of its own, brought home as lists."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.alike import Comparison
from nnsight_pp.engines.vllm import compat
from nnsight_pp.interleave.draws import mentions
from nnsight_pp.wire.merge import merge_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.report import Report
    from nnsight_pp.wire.block_codec import BlockMessage
    from nnsight_pp.wire.merge import Home


# Names and attributes by which a block may read a clock.
_CLOCKS = frozenset({
    "clock_gettime", "default_timer", "monotonic", "now", "perf_counter", "process_time",
    "thread_time", "time", "utcnow",
})  # fmt: skip
# And by which it may know its rank from others.
_RANKS = _CLOCKS | {
    "get_ident", "get_native_id", "getpid", "getppid", "gettid", "gethostname", "get_rank", "hash",
    "id", "monotonic_ns", "perf_counter_ns", "process_time_ns", "time_ns", "token_bytes",
    "token_hex", "urandom", "uuid1", "uuid4", "SystemRandom", "default_rng",
}  # fmt: skip
_PARTS = frozenset({"local"})


def merged(
    reports: Sequence[Report], message: BlockMessage, precision: float, home: Home
) -> Report:
    """Make one report of what the ranks say of the block of ``message``.

    Args:
        reports: One from each rank.
        message: The block.
        precision: The relative precision of the model's values.
        home: Knows the client's own objects.
    """

    def looks_up(words: frozenset[str]) -> bool:
        return mentions(message.block.code(), message.names, words)

    return merge_reports(
        reports,
        message.block,
        partial(Comparison, precision, partial(looks_up, _CLOCKS), partial(looks_up, _RANKS)),
        partial(looks_up, _PARTS),
        home,
    )


def by_sequence(
    reports: Sequence[Report], message: BlockMessage, precision: float, home: Home
) -> list[Report]:
    """Merge what the ranks say of a prompt's sequences: one report each, in their order."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(report.request, []).append(report)
    return [
        merged(found[one], message, precision, home)
        for one in sorted(found, key=compat.sequence_of)
    ]


def bound_by(
    bound: Sequence[dict[str, Any]], sequences: Sequence[Report], *, are_many: bool
) -> dict[str, Any]:
    """Return the names that the ``sequences`` have ``bound``.

    Of many sequences each is a list, with None where one has not bound it. What is saved of
    `tracer.result` is one object: it is that of the prompt.
    """
    if not are_many:
        return dict(bound[0])
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in bound for name in one):
        values = [one.get(name) for one in bound]
        is_result = all(name in one.results for one in sequences)
        found[name] = values[0] if is_result else values
    return found
