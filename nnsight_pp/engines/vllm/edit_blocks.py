"""The stored edits of the requests of one rank: blocks beside the same rows, served first.

Each is a traced request of its own for the `Ledger`, under a name made of vLLM's, so that its asks
have names of their own on the link. Those that share objects come in one piece with the request's
own block, so that these are one here.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, final

from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.traced_request import TracedRequest

if TYPE_CHECKING:
    from nnsight_pp.engines.vllm.ledger import Ledger


@final
class EditBlocks:
    """The stored edits of one rank's requests.

    Args:
        ledger: Runs them.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # By vLLM's id, in order.
        self._blocks: dict[str, list[TracedRequest]] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._blocks

    def of(self, item: compat.Scheduled) -> list[TracedRequest]:
        """Return the stored edits of a request in a step, in order; start those of a new one."""
        payload = None if item.new is None else compat.carried(item.new, compat.EDITS)
        if payload is not None and item.request not in self._blocks:
            traces, parcels = pickle.loads(payload)
            length = item.new.prompt_len
            made = {}
            for number, trace in enumerate(traces):
                seat = number - len(traces)  # before every request's own
                name = f"{item.request} edit {number}"
                made[trace] = TracedRequest(name, trace, length, seat=seat, rows_of=item.request)
            for beside, data in parcels:
                own = TracedRequest(item.request, beside[-1], length)
                self._ledger.prepare_parcel([made.get(one, own) for one in beside], data)
            self._blocks[item.request] = [self._ledger.add(one, b"") for one in made.values()]
        return self._blocks.get(item.request, [])

    def forget_ended(self) -> None:
        """Forget the requests of which the ledger holds no stored edit any more."""
        for request, blocks in list(self._blocks.items()):
            if all(self._ledger.get(one.request) is not one for one in blocks):
                del self._blocks[request]
