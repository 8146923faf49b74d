"""Make one report of the stages' reports for a request.

Each stage ships what is real on it. A leaf that one stage holds only as a stand-in is taken from
the stage that owns it; a leaf that is real on several was computed alike on each, and the first is
taken. Stages that disagree about the structure took different branches in the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.core.report import Elsewhere, Failure, Report
from nnsight_pp.errors import RankDivergenceError

if TYPE_CHECKING:
    from collections.abc import Sequence


def merge_reports(reports: Sequence[Report]) -> Report:
    """Return one report for one request.

    Raises:
        RankDivergenceError: The stages saved different structures, and none of them failed.
    """
    ordered = sorted(reports, key=lambda report: report.stage)
    failure = first_failure([report.failure for report in ordered if report.failure is not None])
    is_partial = failure is not None
    warnings = tuple(dict.fromkeys(text for report in ordered for text in report.warnings))
    return Report(
        request=ordered[0].request,
        stage=ordered[0].stage,
        trace=ordered[0].trace,
        saved=_merge_names([report.saved for report in ordered], is_partial=is_partial),
        grown=_merge_names([report.grown for report in ordered], is_partial=is_partial),
        failure=failure,
        warnings=warnings,
        statistics={str(report.stage): report.statistics for report in ordered},
    )


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that came first in the block; one that repeats another comes last."""
    if not failures:
        return None
    return min(failures, key=lambda failure: (failure.is_echo, failure.asked, failure.stage))


def _merge_names(parts: list[dict[str, Any]], *, is_partial: bool) -> dict[str, Any]:
    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        try:
            if len(values) != len(parts):
                raise _Mismatch(f"{len(values)} of {len(parts)} stages saved it")
            merged[name] = _merge(values)
        except _Mismatch as mismatch:
            if not is_partial:
                raise RankDivergenceError(
                    f"The stages disagree about the saved value {name!r}: {mismatch}. Every rank "
                    "runs the same block and must take the same branches: make the block "
                    "independent of time, process ids, and set order."
                ) from None
    return merged


class _Mismatch(Exception):
    pass


def _merge(values: list[Any]) -> Any:
    real = [value for value in values if not isinstance(value, Elsewhere)]
    if not real:
        raise _Mismatch("no stage sent it")
    first = real[0]
    if isinstance(first, dict):
        _same([set(value) if isinstance(value, dict) else None for value in real], "keys")
        items = {key: _merge([value[key] for value in real]) for key in first}
        if type(first) is dict:
            return items
        for key, item in items.items():
            first[key] = item
        return first
    if isinstance(first, (list, tuple)):
        _same([len(v) if isinstance(v, (list, tuple)) else None for v in real], "lengths")
        items = [_merge([value[index] for value in real]) for index in range(len(first))]
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*items)
        return type(first)(items)
    return first


def _same(facts: list[Any], what: str) -> None:
    if any(fact != facts[0] for fact in facts):
        raise _Mismatch(f"different {what} {facts}")
