"""A prompt's sequences (`n` of them), each with a worker of its own, brought home as lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.engines.vllm import compat
from nnsight_pp.wire.merge import merge_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.report import Report


def by_sequence(reports: Sequence[Report]) -> list[Report]:
    """Merge what the stages say of a prompt's sequences: one report each, in their order."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(report.request, []).append(report)
    return [merge_reports(found[one]) for one in sorted(found, key=compat.sequence_of)]


def bound_by(sequences: Sequence[Report], *, are_many: bool) -> dict[str, Any]:
    """Return the saved names: of many sequences each as a list, with None where one has not saved.

    What is saved of `tracer.result` is one object: it is that of the prompt.
    """
    if not are_many:
        return dict(sequences[0].saved)
    names = dict.fromkeys(name for one in sequences for name in one.saved)
    bound: dict[str, Any] = {}
    for name in names:
        values = [one.saved.get(name) for one in sequences]
        is_result = all(name in one.results for one in sequences)
        bound[name] = values[0] if is_result else values
    return bound
