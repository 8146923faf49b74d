"""Make one report of the stages' reports for a request.

Each stage ships what is real on it. A leaf that one stage holds only as a stand-in is taken from
the stage that owns it; a leaf that is real on several was computed alike on each, and the first is
taken. Stages that disagree about the structure took different branches in the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.kept import AtHome, Split
from nnsight_pp.core.report import Elsewhere, Failure, Report
from nnsight_pp.core.tree import children, rebuild
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
    trails = {report.trail for report in ordered}
    if failure is None and len(trails) > 1:
        asks = ", ".join(f"stage {r.stage}: {r.trail[0] if r.trail else 0}" for r in ordered)
        raise RankDivergenceError(
            f"The stages asked for different values ({asks} asks). Every rank runs the same block "
            "and must take the same branches: make the block independent of time, process ids, "
            "and set order."
        )
    warnings: tuple[str, ...] = ()
    if failure is None:  # else a stage that was still waiting tells of what the failure has caused
        warnings = tuple(dict.fromkeys(text for report in ordered for text in report.warnings))
    return Report(
        request=ordered[0].request,
        stage=ordered[0].stage,
        trace=ordered[0].trace,
        saved=_merge_names([report.saved for report in ordered], is_partial=is_partial),
        grown=_merge_names([report.grown for report in ordered], is_partial=is_partial),
        failure=failure,
        kept=_merge_kept([report.kept for report in ordered]),
        warnings=warnings,
        results=ordered[0].results,
        statistics={str(report.stage): report.statistics for report in ordered},
    )


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that came first in the block; one that repeats another comes last."""
    if not failures:
        return None
    return min(failures, key=lambda failure: (failure.is_echo, failure.failed_at, failure.stage))


def _merge_names(parts: list[dict[str, Any]], *, is_partial: bool) -> dict[str, Any]:
    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        try:
            if len(values) != len(parts):
                raise _MismatchError(f"{len(values)} of {len(parts)} stages saved it")
            merged[name] = _merge(values)
        except _MismatchError as mismatch:
            if not is_partial:
                raise RankDivergenceError(
                    f"The stages disagree about the saved value {name!r}: {mismatch}. Every rank "
                    "runs the same block and must take the same branches: make the block "
                    "independent of time, process ids, and set order."
                ) from None
    return merged


def _merge_kept(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge what a session keeps; what the stages hold in forms of their own is lost."""
    lost = AtHome("lost", "a value that the stages hold in different forms")
    names = dict.fromkeys((name for part in parts for name in part), lost)
    return {**names, **_merge_names(parts, is_partial=True)}


class _MismatchError(Exception):
    pass


def _merge(values: list[Any]) -> Any:
    real = [value for value in values if not isinstance(value, Elsewhere)]
    if not real:
        raise _MismatchError("no stage sent it")
    first = real[0]
    _same([type(value).__name__ for value in real], "types")
    held = [children(value) for value in real]
    if isinstance(first, Split):
        return first.joined(real)
    if held[0] is None:
        _same_leaf(real)
        return first
    if isinstance(first, dict):
        _same([list(value) for value in real], "keys")
    _same([len(items or ()) for items in held], "lengths")
    columns = zip(*[items or () for items in held], strict=True)
    return rebuild(first, [_merge(list(column)) for column in columns])


def _same_leaf(real: list[Any]) -> None:
    """Raise where a leaf that several stages hold cannot have been computed alike."""
    first = real[0]
    if isinstance(first, torch.Tensor):
        _same([(tuple(value.shape), value.dtype) for value in real], "shapes")
    elif isinstance(first, (int, str, bytes)):
        _same(real, "values")


def _same(facts: list[Any], what: str) -> None:
    if any(fact != facts[0] for fact in facts):
        raise _MismatchError(f"different {what} {facts}")
