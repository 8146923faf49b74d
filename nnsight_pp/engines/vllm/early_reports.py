"""Reports that come home with a request's last token, instead of in answers to a call of their own.

A collect is one more way through the engine's processes and back. It has nothing to wait for where
a block is over in the last step of its request: then each stage adds its report to the activations
that it sends on, and the last one hands those of all stages to the scheduler, beside the sampled
tokens (`schedule`).

Invariant: the reports of all stages are of one step, in which the request ends. If one of them does
not come along, the others are dropped, and the client collects: nothing is forgotten here before
the scheduler has said that all are on their way.
"""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.tree import leaves
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.activations import take_bytes, with_bytes
from nnsight_pp.errors import EarlyStopException
from nnsight_pp.wire.report_codec import encoded
from nnsight_pp.wire.value_codec import in_one_piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nnsight_pp.core.report import Report
    from nnsight_pp.engines.vllm.ledger import Ledger
    from nnsight_pp.engines.vllm.traced_request import TracedRequest
    from nnsight_pp.parallel.place import Place

log = logging.getLogger(__name__)
# What one report may hold. More of it would hold up the step, which others may share.
_MOST_BYTES, _MOST_VALUES = 64 << 10, 64
# What the activations of a step may hold already: vLLM sends a few tensors at once, not any number.
_MOST_TENSORS = 4


@final
class EarlyReports:
    """The reports of the running step on one rank.

    Args:
        ledger: Makes this stage's.
        place: Where the rank stands.
    """

    def __init__(self, ledger: Ledger, place: Place) -> None:
        self._ledger = ledger
        self._place = place
        self._can_ride = place.tp_size == 1 and (place.num_stages == 1 or compat.IS_CPU)
        # By request, from the first stage on.
        self._found: dict[str, list[bytes]] = {}

    def begin(self, activations: Any) -> None:
        """Take what the stages before have sent with ``activations``, and leave nothing of it."""
        self._found = {}
        data = take_bytes(activations)
        if data is not None:
            self._found = pickle.loads(data)

    def add(self, batch: Sequence[tuple[TracedRequest, int]]) -> None:
        """Add this stage's reports of the requests that end with the running step.

        Args:
            batch: The step's traced requests, each with its step.
        """
        try:
            self._add(batch)
        except Exception:  # then they are collected
            log.exception("nnsight_pp could not report early on %s", self._place)
            self._found = {}

    def _add(self, batch: Sequence[tuple[TracedRequest, int]]) -> None:
        earlier, self._found = self._found, {}
        for traced, step in batch if self._can_ride else ():
            found = earlier.get(traced.request, [])
            if len(found) == self._place.stage and _is_over(traced, step):
                data = _encoded(self._ledger.report(traced))
                if data is not None:
                    self._found[traced.request] = [*found, data]

    def on_board(self, activations: Any) -> Any:
        """Return ``activations``, which go to the next stage, with the reports so far."""
        found, self._found = self._found, {}
        if not found:
            return activations
        return with_bytes(activations, pickle.dumps(found), most_tensors=_MOST_TENSORS)

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests whose reports are on their way to the client."""
        for request in requests:
            traced = self._ledger.get(request)
            if traced is not None:
                self._ledger.forget(traced)

    def take(self) -> dict[str, list[bytes]]:
        """Return the reports of all stages, by request. For the last stage."""
        found, self._found = self._found, {}
        return found


def _is_over(traced: TracedRequest, step: int) -> bool:
    """Whether the block is over as it should be, and its request ends with ``step``."""
    worker = traced.worker
    if traced.error is not None or worker is None or not worker.has_ended:
        return False
    if worker.error is not None:
        return traced.last_step is not None and isinstance(worker.error, EarlyStopException)
    return step == traced.last_step


def _encoded(report: Report) -> bytes | None:
    """Return ``report`` as bytes; None where it is large, has failed or cannot be sent."""
    if report.failure is not None:
        return None
    total = 0
    for number, leaf in enumerate(leaves((report.saved, report.grown))):
        if issubclass(type(leaf), torch.Tensor):
            total += leaf.nbytes
        if number >= _MOST_VALUES or total > _MOST_BYTES:
            return None
    try:
        data = in_one_piece(*encoded([report]))
    except Exception:  # the collect says why
        log.debug("a report cannot be sent", exc_info=True)
        return None
    return data if len(data) <= 2 * _MOST_BYTES else None
