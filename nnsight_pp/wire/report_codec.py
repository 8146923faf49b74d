"""Reports on their way back: saves as raw tensor bytes, exceptions with their class and lines."""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from nnsight_pp.core.alike import Sampled
from nnsight_pp.core.kept import Split
from nnsight_pp.core.report import Elsewhere, Failure, Report
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import STAND_IN, ValueUnavailableError
from nnsight_pp.wire.parcel import (
    LEAST_BYTES,
    Parcel,
    is_parcel,
    open_parcel,
    should_be_dropped,
    value_in,
)
from nnsight_pp.wire.value_codec import encode, from_bytes, in_one_piece, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.kept import FromHome

log = logging.getLogger(__name__)

# One object, which pickle writes once for a whole report.
_ELSEWHERE = Elsewhere()
# What C++ says of a lazy value: torch's, and that of pybind, which shows the value itself.
_UNTAKEN = ("LazyRemoteTensor", "incompatible function arguments", "TensorWrapper")


def encode_reports(reports: list[Report], parcel: Parcel) -> bytes | dict[str, Any]:
    """Return ``reports`` as bytes, or where they are: large ones go into ``parcel``.

    A value that cannot be sent becomes its report's failure.
    """
    parcel.drop()
    try:
        header, pieces = encoded(reports)
    except Exception:
        header, pieces = encoded([_sendable(report) for report in reports])
    if sum(len(piece) for piece in pieces) >= LEAST_BYTES:
        try:
            return parcel.pack(header, pieces)
        except OSError as error:
            log.warning("reports go through the engine's messages: %s", error)
    return in_one_piece(header, pieces)


def encoded(reports: list[Report]) -> tuple[bytes, list[torch.Tensor]]:
    """Return ``reports`` as `value_codec.encode` gives them.

    Raises:
        Exception: Whatever pickling some part of them raises.
    """
    return encode([replace(one, homeward=None) for one in reports], _instead_in(reports))


def _instead_in(reports: list[Report]) -> Callable[[Any], Any] | None:
    """Return what exchanges objects inside of the values of ``reports``, where it is needed."""
    found = {id(one.homeward): one.homeward for one in reports if one.homeward is not None}
    deep = [one.instead_of for one in found.values() if one.is_deep]
    if len(deep) < 2:
        return deep[0] if deep else None
    return lambda obj: next((one for one in (ask(obj) for ask in deep) if one is not None), None)


def decode_reports(
    answers: Sequence[Any],
    fetch: Callable[[bool], list[Any]],
    own: Callable[[FromHome], Any] = lambda word: word,
) -> list[Report]:
    """Return the reports in the ranks' ``answers`` to `collect`.

    Args:
        answers: Bytes, or where a parcel is; empty from a rank that does not report.
        fetch: Tells every rank that its parcel is not needed any more; given True, each of them
            answers with the parcel's bytes.
        own: Returns the client's own object for what stands for it.
    """
    found: list[list[Report]] = []
    away = [answer for answer in answers if is_parcel(answer)]
    if away:
        try:
            found += [open_parcel(answer, own) for answer in away]
        except OSError as error:
            log.info("reports go through the engine's messages: %s", error)
            found = [value_in(bytearray(answer), own) for answer in fetch(True) if answer]
        else:
            if any(should_be_dropped(answer) for answer in away):
                fetch(False)
    found += [from_bytes(answer, own) for answer in answers if answer and not is_parcel(answer)]
    # By stage, whatever way they came.
    return sorted((one for reports in found for one in reports), key=lambda one: one.stage)


def _sendable(report: Report) -> Report:
    instead = _instead_in([report])
    saved, failure = _sendable_names(report.saved, report.failure, report.stage, instead)
    grown, failure = _sendable_names(report.grown, failure, report.stage, instead)
    kept, _ = _sendable_names(report.kept, None, report.stage, instead)
    return replace(report, saved=saved, grown=grown, kept=kept, failure=failure)


def _sendable_names(
    names: dict[str, Any],
    failure: Failure | None,
    stage: int,
    instead_of: Callable[[Any], Any] | None,
) -> tuple[dict[str, Any], Failure | None]:
    """Return those of ``names`` that can be sent; the first other one becomes the failure."""
    sent: dict[str, Any] = {}
    for name, value in names.items():
        try:
            to_bytes(value, instead_of)
        except Exception as error:
            text = (
                f"The saved value {name!r} ({type(value).__name__}) cannot leave the engine: "
                f"{type(error).__name__}: {error}"
            )
            failure = failure or failure_of(ValueUnavailableError(text), "", stage, 0)
        else:
            sent[name] = value
    return sent, failure


def as_witness(report: Report) -> Report:
    """Return what a rank tells of ``report`` where another rank of its stage reports."""

    def shown(leaf: Any) -> Any:
        # CAUTION: a remote value answers `isinstance` by moving bytes.
        kind = type(leaf)
        if not issubclass(kind, torch.Tensor):
            return _ELSEWHERE if issubclass(kind, Split) else leaf
        try:
            return Sampled.of(leaf)
        except Exception:  # it cannot be sent either, as the rank that reports will say
            return _ELSEWHERE

    same = dict.fromkeys(report.results, _ELSEWHERE)
    return replace(
        report,
        saved={**map_leaves(report.saved, shown), **same},
        grown=map_leaves(report.grown, shown),
        kept={},
        statistics={},
        is_witness=True,
    )


def failure_of(
    error: BaseException, filename: str, stage: int, failed_at: int, *, is_echo: bool = False
) -> Failure:
    """Return ``error`` in a form that crosses processes.

    Args:
        error: What ended the block.
        filename: The block's file; frames before its first one are ours, not the user's.
        stage: Where it was raised.
        failed_at: Where in the block's asks; the smallest of several is the first.
        is_echo: Whether it only repeats that another stage failed.
    """
    if isinstance(error, (TypeError, RuntimeError)) and any(one in str(error) for one in _UNTAKEN):
        error.add_note(STAND_IN)
    try:
        pickled: bytes | None = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    return Failure(
        name=type(error).__name__,
        text=str(error),
        pickled=pickled,
        frames=user_frames(error, filename),
        stage=stage,
        failed_at=failed_at,
        is_echo=is_echo,
    )


def user_frames(error: BaseException, filename: str) -> tuple[tuple[str, int, str], ...]:
    """Return file, line and function of the frames from the block's on, outermost first.

    Frames of this package are left out.
    """
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith("nnsight_pp.")
    ]
    for position, (file, _, _) in enumerate(frames):
        if file == filename:
            return tuple(frames[position:])
    return ()
