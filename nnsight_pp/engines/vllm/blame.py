"""Failures that no block has raised, put on the requests that they concern.

Nothing may leave a call that vLLM makes: an exception on one rank wedges the whole engine. So what
fails in our own code, in the model's code beside a block, or because vLLM is not as we know it, is
an error of requests with a block, and nobody else notices.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from nnsight_pp.core.report import Report
from nnsight_pp.engines.vllm import compat
from nnsight_pp.errors import BlockError, EngineError, InternalError, explain
from nnsight_pp.wire.report_codec import failure_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nnsight_pp.engines.vllm.ledger import Ledger
    from nnsight_pp.engines.vllm.traced_request import TracedRequest
    from nnsight_pp.parallel.place import Place

log = logging.getLogger(__name__)


@final
class Blame:
    """Fails requests of one rank.

    Args:
        ledger: The rank's requests.
        place: Where the rank stands.
    """

    __slots__ = ("_ledger", "_place", "_unread")

    def __init__(self, ledger: Ledger, place: Place) -> None:
        self._ledger = ledger
        self._place = place
        # What could not be read last: a request that never came here has failed by it.
        self._unread: EngineError | None = None

    def broke(self, doing: str, error: Exception, *traced: TracedRequest | None) -> None:
        """Put a failure of our own on ``traced``."""
        log.exception("nnsight_pp failed while %s on %s", doing, self._place, exc_info=error)
        for one in traced:
            if one is not None:
                text = f"nnsight_pp failed while {doing} ({type(error).__name__}: {error})"
                self._ledger.fail(one, InternalError(f"{text} [{self._place}]"))

    def model_failed(self, error: Exception, traced: Iterable[TracedRequest]) -> None:
        """Put an exception of the model's own code on the requests of its step."""
        log.warning("the model failed with a block beside it on %s", self._place, exc_info=error)
        for one in traced:
            ran = f"request {one.request} | {self._place}"
            self._ledger.fail(one, _beside_failure(error, ran))

    def unread(self, doing: str, error: Exception) -> None:
        """Note that vLLM is not as we know it: every request with a block fails.

        Args:
            doing: What was looked at, for a message: it follows "while".
            error: What came of it.
        """
        found = _unread(doing, error, str(self._place))
        if str(found) != str(self._unread):  # else it would be said again in every step
            log.exception("vLLM could not be read while %s", doing, exc_info=error)
        self._unread = found
        for traced in self._ledger.requests():
            self._ledger.fail(traced, found)

    def reports(self, trace: str, stage: int) -> list[Report]:
        """Return what this rank says of a trace that it has never seen; mostly nothing."""
        if self._unread is None:
            return []
        return [Report(trace, stage, trace, failure=failure_of(self._unread, "", stage, 0))]


def _beside_failure(error: Exception, ran: str) -> BlockError:
    """Return the error for a block beside which the model's own code has raised ``error``."""
    return BlockError(
        explain(
            f"The model failed beside this block: {type(error).__name__}: {error}",
            why="A value that a block of this step wrote made the model's own code raise.",
            todo="Check what is written into .input and .output of the modules.",
            ran=ran,
        )
    )


def _unread(doing: str, error: Exception, ran: str) -> EngineError:
    return EngineError(
        explain(
            f"vLLM {compat.VERSION} is not as nnsight_pp knows it: while {doing}, "
            f"{type(error).__name__}: {error}",
            why=f"Blocks are written for vLLM {compat.WRITTEN_FOR}, and the engine goes on without "
            "them.",
            todo=f"Install vLLM {compat.WRITTEN_FOR}, or a newer nnsight_pp.",
            ran=ran,
        )
    )
