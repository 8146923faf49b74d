"""Bringing the stages' reports in: with their requests' last tokens, or by a call to all ranks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from nnsight_pp.engines.vllm.schedule import reports_of
from nnsight_pp.wire.report_codec import decode_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nnsight_pp.core.report import Report


def came_home(outputs: Iterable[Any]) -> dict[str, list[Report]]:
    """Take the reports that came with vLLM's ``outputs`` out of these; return them by trace."""
    found: dict[str, list[Report]] = {}
    for output in outputs:
        answers = reports_of(output)
        if answers is not None:
            _sort_in(found, decode_reports(answers, lambda _: []))
    return found


def collect(
    call: Callable[..., list[Any]], wanted: list[tuple[str, bytes | None]]
) -> dict[str, list[Report]]:
    """Return the stages' reports by trace, and let the ranks forget their requests.

    Args:
        call: Calls a method on every rank and returns their answers.
        wanted: The traces, each with the result of its request.
    """
    found: dict[str, list[Report]] = {}
    if wanted:
        answers = call("nnsight_collect", pickle.dumps(wanted))
        fetch = lambda is_wanted: call("nnsight_fetch", is_wanted)  # noqa: E731
        _sort_in(found, decode_reports(answers, fetch))
    return found


def _sort_in(found: dict[str, list[Report]], reports: list[Report]) -> None:
    for report in reports:
        found.setdefault(report.trace, []).append(report)
