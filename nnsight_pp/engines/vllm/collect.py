"""Bringing the stages' reports in: with their requests' last tokens, or by a call to all ranks."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from nnsight_pp.engines.vllm.schedule import reports_of
from nnsight_pp.wire.report_codec import decode_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nnsight_pp.core.kept import FromHome
    from nnsight_pp.core.report import Report


def _as_it_is(word: FromHome) -> Any:
    return word


def came_home(
    outputs: Iterable[Any], own: Callable[[FromHome], Any] = _as_it_is
) -> dict[str, list[Report]]:
    """Take the reports that came with vLLM's ``outputs`` out of these; return them by trace.

    ``own`` returns the client's own object for what stands for it.
    """
    found: dict[str, list[Report]] = {}
    for output in outputs:
        answers = reports_of(output)
        if answers is not None:
            _sort_in(found, decode_reports(answers, lambda _: [], own))
    return found


def collect(
    call: Callable[..., list[Any]],
    wanted: list[tuple[str, bytes | None]],
    own: Callable[[FromHome], Any] = _as_it_is,
) -> dict[str, list[Report]]:
    """Return the stages' reports by trace, and let the ranks forget their requests.

    Args:
        call: Calls a method on every rank and returns their answers.
        wanted: The traces, each with the result of its request.
        own: Returns the client's own object for what stands for it.
    """
    found: dict[str, list[Report]] = {}
    if wanted:
        answers = call("nnsight_collect", pickle.dumps(wanted))
        fetch = lambda is_wanted: call("nnsight_fetch", is_wanted)  # noqa: E731
        _sort_in(found, decode_reports(answers, fetch, own))
    return found


def _sort_in(found: dict[str, list[Report]], reports: list[Report]) -> None:
    for report in reports:
        found.setdefault(report.trace, []).append(report)
