"""Blocks that are decoded on a later stage before its activations are there."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.traced_request import TracedRequest

if TYPE_CHECKING:
    from nnsight_pp.engines.vllm.ledger import Ledger
    from nnsight_pp.parallel.place import Place

log = logging.getLogger(__name__)


@final
class EarlyBlocks:
    """The blocks that begin with a step.

    Args:
        ledger: Decodes them, and starts them later.
        place: Where the rank stands.
    """

    def __init__(self, ledger: Ledger, place: Place) -> None:
        self._ledger = ledger
        self._place = place

    def prepare(self, output: Any) -> None:
        """Decode the blocks that begin with a step, while the stage before computes its part."""
        if self._place.stage == 0:
            return
        try:
            for new in compat.new_requests(output):
                payload = compat.carried(new)
                if payload is not None and self._ledger.get(new.req_id) is None:
                    trace, data, member, _ = pickle.loads(payload)
                    if data and member is None:  # none: it comes with stored edits
                        begun = TracedRequest(new.req_id, trace, new.prompt_len)
                        self._ledger.prepare(begun, data)
        except Exception:  # it is done when the step begins, and fails there
            log.debug("blocks could not be decoded early", exc_info=True)
