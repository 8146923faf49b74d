"""Make one report of the stages' reports for a request.

Each stage ships what is real on it. A leaf that one stage holds only as a stand-in is taken from
the stage that owns it; a leaf that is real on several was computed on each, must be alike there
(`core.alike`), and the first is taken. A tensor-parallel rank beside the one that reports for its
stage is a witness: it tells what it has, and ships no tensor. Ranks that disagree took different
branches in the block, or used what only one of them has: the request has failed.
"""

from __future__ import annotations

import marshal
import reprlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.alike import Comparison
from nnsight_pp.core.kept import AtHome, FromHome, Split
from nnsight_pp.core.report import Elsewhere, Failure, Report
from nnsight_pp.core.tree import children, leaves, refill
from nnsight_pp.errors import RankDivergenceError, Where, explain
from nnsight_pp.wire.report_codec import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.block import Block

_WHY = (
    "Every rank runs the block, and must take the same branches and compute the same values: what "
    "comes back does not depend on the rank."
)
_TODO = (
    "Make the block independent of time, process ids, and set order; what must differ, compute "
    "before the `with`."
)


def _as_it_is(word: FromHome) -> Any:
    return word


@final
class Home:
    """What the client knows while it merges the reports of one run.

    Attributes:
        own: Returns the client's own object for what stands for it.
        merged: By the ids of what the stages have of it: a container that stands in two places,
            with what keeps those ids.
    """

    def __init__(self, own: Callable[[FromHome], Any] = _as_it_is) -> None:
        self.own = own
        self.merged: dict[tuple[int, ...], tuple[Any, Any]] = {}


def merge_reports(
    reports: Sequence[Report],
    block: Block | None = None,
    new_comparison: Callable[[], Comparison] = Comparison,
    sees_parts: Callable[[], bool] = lambda: False,
    home: Home | None = None,
) -> Report:
    """Return one report for one request.

    Args:
        reports: What the ranks say.
        block: The block, to name its lines.
        new_comparison: Makes what compares one value of one rank with that of another.
        sees_parts: Whether the block may look at a rank's own part of a weight, so that the
            tensor-parallel ranks may differ. Asked only where they do.

    Where ranks disagree and none of them failed, the report's failure is a `RankDivergenceError`.
    """
    every = sorted(reports, key=lambda report: (report.stage, report.is_witness))
    ordered = [report for report in every if not report.is_witness] or every
    failure = first_failure([report.failure for report in every if report.failure is not None])
    # Before what they share is filled with what was merged.
    unlike = None if failure else _unlike_a_witness(every, new_comparison, sees_parts)
    merging = _Merging(ordered, new_comparison, home or Home())
    saved = merging.names([report.saved for report in ordered])
    grown = merging.names([report.grown for report in ordered])
    if failure is None:
        error = _apart_by_asks(ordered)
        first = merging.first or unlike
        if error is None and first is not None:
            error = _apart_by_value(first, block)
        if error is not None:
            failure = _failure(error, block, first)
            if first is None:
                saved, grown = {}, {}
    warnings: tuple[str, ...] = ()
    if failure is None:  # else a stage that was still waiting tells of what the failure has caused
        warnings = tuple(dict.fromkeys(text for report in ordered for text in report.warnings))
    return Report(
        request=ordered[0].request,
        stage=ordered[0].stage,
        trace=ordered[0].trace,
        saved=saved,
        grown=grown,
        failure=failure,
        kept=_merge_kept(ordered, new_comparison),
        warnings=warnings,
        results=ordered[0].results,
        statistics={str(report.stage): report.statistics for report in ordered},
    )


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that came first in the block; one that repeats another comes last."""
    if not failures:
        return None
    return min(failures, key=lambda failure: (failure.is_echo, failure.failed_at, failure.stage))


class _Mismatch(NamedTuple):
    """Two ranks that do not say the same of one name."""

    name: str
    text: str
    path: str = ""


class _MismatchError(Exception):
    """Carries what differs, and where behind the name it stands."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.path = path


_PLAIN = frozenset({int, str, float, bool, type(None), tuple})


@final
class _Merging:
    """The names of several stages on their way to become those of one.

    Attributes:
        first: The first name of which they do not say the same. It is left out.
    """

    def __init__(
        self, reports: Sequence[Report], new_comparison: Callable[[], Comparison], home: Home
    ) -> None:
        self._stages = [report.stage for report in reports]
        self._new_comparison = new_comparison
        self._home = home
        self._reports = reports
        self._looks: list[Counter[int]] = []
        self.first: _Mismatch | None = None

    def names(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the merged values of the names in ``parts``, one for each stage."""
        merged = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            has = [name in part for part in parts]
            try:
                if not all(has):
                    missing = self._stages[has.index(False)]
                    raise _MismatchError(
                        f"stage {self._stages[has.index(True)]} has it, and stage {missing} has not"
                    )
                pairs = zip(self._stages, parts, strict=True)
                merged[name] = self._merged([(stage, part[name]) for stage, part in pairs])
            except _MismatchError as error:
                self.first = self.first or _Mismatch(name, error.text, error.path)
        return merged

    def _merged(self, values: list[tuple[int, Any]]) -> Any:
        real = [(stage, value) for stage, value in values if not isinstance(value, Elsewhere)]
        if not real:
            raise _MismatchError("no stage sent it")
        (first_stage, first), *others = real
        parts = children(first)
        for stage, value in others:
            self._check_alike(first_stage, first, stage, value, is_leaf=parts is None)
        if isinstance(first, Split):
            return first.joined([value for _, value in real])
        if type(first) is FromHome:
            return self._home.own(first)
        if parts is None:
            return first if len(real) == 1 else self._one_of(real)
        stages = [stage for stage, _ in real]
        ids = tuple([id(value) for _, value in real])
        known = self._home.merged.get(ids)
        if known is not None:
            return known[0]
        merged = []
        for column in zip(*[children(value) or () for _, value in real], strict=True):
            only = _only_tensor(column)
            if only is not None or _is_one_key(column):
                merged.append(column[0] if only is None else only)
                continue
            try:
                merged.append(self._merged(list(zip(stages, column, strict=True))))
            except _MismatchError as error:
                place = _places_in(first)[len(merged)]
                raise _MismatchError(error.text, f"{place}{error.path}") from None
        # The container itself, where it can be: functions and objects that hold it have it too.
        whole = refill(first, merged)
        self._home.merged[ids] = whole, real
        return whole

    def _one_of(self, real: list[tuple[int, Any]]) -> Any:
        """Return what one of several stages has of a leaf.

        Of a tensor, that of a stage which has others in the same memory, as it has where they were
        made of each other: a value that only its owner ships, and a view of it that every stage has
        computed.
        """
        if type(real[0][1]) is not torch.Tensor:
            return real[0][1]
        if not self._looks:
            for report in self._reports:
                held = leaves((report.saved, report.grown))
                self._looks.append(Counter(map(_memory_of, held)))
        looks = dict(zip(self._stages, self._looks, strict=True))
        return max(real, key=lambda one: looks[one[0]][_memory_of(one[1])])[1]

    def _check_alike(
        self, stage: int, value: Any, other_stage: int, other: Any, *, is_leaf: bool
    ) -> None:
        """Raise where what two stages hold, but for the parts of containers, is not alike."""
        held, others = value, other
        if type(value) is type(other) is tuple and len(value) == len(other):
            return
        if not is_leaf and type(value).__name__ == type(other).__name__:
            held, others = _frame_of(value), _frame_of(other)
            if _are_plainly_equal(held, others):
                return
        apart = self._new_comparison().apart(held, others)
        if apart is not None:
            mine, theirs = reprlib.repr(apart.one), reprlib.repr(apart.other)
            text = f"stage {stage} has {mine}, stage {other_stage} has {theirs}"
            raise _MismatchError(text, apart.path if is_leaf else "")


def _memory_of(leaf: Any) -> int:
    is_there = type(leaf) is torch.Tensor and leaf.layout == torch.strided
    return leaf.untyped_storage()._cdata if is_there else 0


def _frame_of(value: Any) -> Any:
    """Return what a container is without its parts."""
    if isinstance(value, dict):
        return list(value)
    return f"{type(value).__name__} of {len(children(value) or ())}"


def _are_plainly_equal(one: Any, other: Any) -> bool:
    """Whether both are the same plain data, down to the types. A quick look: False leaves it open.

    Thousands of keys are compared in no loop of ours. `marshal` takes nothing but plain data, and
    its second version writes no references, so that what is alike gives the same bytes.
    """
    try:
        return marshal.dumps(one, 2) == marshal.dumps(other, 2)
    except ValueError:
        return False


def _only_tensor(column: tuple[Any, ...]) -> Any:
    """Return the tensor that one stage ships and the others leave to it, else None."""
    real = [value for value in column if type(value) is not Elsewhere]
    return real[0] if len(real) == 1 and type(real[0]) is torch.Tensor else None


def _is_one_key(column: tuple[Any, ...]) -> bool:
    """Whether it is plain, as keys of dicts mostly are, and every stage has the same there."""
    first = column[0]
    kinds = set(map(type, first)) if type(first) is tuple else {type(first)}
    if not kinds <= _PLAIN:  # a pair of a key and a tensor, mostly: asking `marshal` costs more
        return False
    return all(_are_plainly_equal(first, other) for other in column[1:] or column)


def _places_in(value: Any) -> list[str]:
    """Return how each of the `children` of ``value`` is found in it."""
    if isinstance(value, dict):
        return [f"[{key!r}]" for key in value]
    return [f"[{index}]" for index in range(len(children(value) or ()))]


def _merge_kept(
    reports: Sequence[Report], new_comparison: Callable[[], Comparison]
) -> dict[str, Any]:
    """Merge what a session keeps; what the stages hold in forms of their own is lost."""
    parts = [report.kept for report in reports]
    lost = AtHome("lost", "a value that the stages hold in different forms")
    names = dict.fromkeys((name for part in parts for name in part), lost)
    return {**names, **_Merging(reports, new_comparison, Home()).names(parts)}


def _unlike_a_witness(
    reports: Sequence[Report],
    new_comparison: Callable[[], Comparison],
    sees_parts: Callable[[], bool],
) -> _Mismatch | None:
    """Return where a witness does not say what the rank of its stage says that reports."""
    leads = {report.stage: report for report in reports if not report.is_witness}
    for witness in (report for report in reports if report.is_witness):
        lead = leads.get(witness.stage, witness)
        ran = f"on stage {lead.stage} one tensor-parallel rank has"
        for mine, theirs in ((lead.saved, witness.saved), (lead.grown, witness.grown)):
            for name in dict.fromkeys((*mine, *theirs)):
                if (name in mine) != (name in theirs):
                    return _Mismatch(name, f"{ran} it, another has not")
                apart = new_comparison().apart(mine[name], theirs[name])
                if apart is not None and not sees_parts():
                    text = (
                        f"{ran} {reprlib.repr(apart.one)}, another has {reprlib.repr(apart.other)}"
                    )
                    return _Mismatch(name, text, apart.path)
    return None


def _apart_by_asks(ordered: Sequence[Report]) -> RankDivergenceError | None:
    """Return the error of stages whose workers did not make the same asks."""
    if len({report.trail for report in ordered}) == 1:
        return None
    asks = ", ".join(f"stage {one.stage}: {one.trail[0] if one.trail else 0}" for one in ordered)
    what = f"The stages asked for different values ({asks} asks)."
    return RankDivergenceError(explain(what, why=_WHY, todo=_TODO))


def _apart_by_value(mismatch: _Mismatch, block: Block | None) -> RankDivergenceError:
    line = None if block is None else block.line_of(mismatch.name)
    where = None if block is None or line is None else Where(block.filename, line)
    behind = f", at {mismatch.name}{mismatch.path}" if mismatch.path else ""
    what = f"The ranks disagree about the saved value {mismatch.name!r}{behind}: {mismatch.text}."
    return RankDivergenceError(explain(what, where=where, why=_WHY, todo=_TODO))


def _failure(
    error: RankDivergenceError, block: Block | None, mismatch: _Mismatch | None
) -> Failure:
    failure = failure_of(error, "", 0, 0)
    line = None if block is None or mismatch is None else block.line_of(mismatch.name)
    if block is None or line is None:
        return failure
    return replace(failure, frames=((block.filename, line, block.name),))
