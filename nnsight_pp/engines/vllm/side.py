"""A rank's side of tracing: what happens around each step, and what never escapes from it.

Everything here is called from vLLM's own calls (`execute_model`, the forward, sampling, a
collective RPC). An exception that leaves one of them on one rank wedges the whole engine, so each
entry point catches what our own code raises and puts it on the requests that it concerns.

Source: vllm 0.32.0 v1/executor/multiproc_executor.py: only one rank's reply is awaited.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.location import LOGITS, SAMPLES, Location
from nnsight_pp.core.rows import Rows, TokenCut
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.blame import Blame
from nnsight_pp.engines.vllm.early_blocks import EarlyBlocks
from nnsight_pp.engines.vllm.early_reports import EarlyReports
from nnsight_pp.engines.vllm.edit_blocks import EditBlocks
from nnsight_pp.engines.vllm.schedule import StepPlan
from nnsight_pp.engines.vllm.traced_request import TracedRequest
from nnsight_pp.wire.parcel import Parcel
from nnsight_pp.wire.report_codec import as_witness, encode_reports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_pp.core.report import Report
    from nnsight_pp.engines.vllm.ledger import Ledger
    from nnsight_pp.engines.vllm.points import Points
    from nnsight_pp.interleave.interleaver import Interleaver
    from nnsight_pp.parallel.gloo_link import GlooLink
    from nnsight_pp.parallel.place import Place

# How long a release may be on its way before the gauges show what it leaves.
_SETTLE_S = 2.0


@final
class RankSide:
    """Tracing on one rank: its workers, its traced requests, its serve points, its link."""

    def __init__(
        self,
        place: Place,
        turns: Interleaver,
        ledger: Ledger,
        points: Points,
        link: GlooLink | None,
    ) -> None:
        self.place = place
        self._turns = turns
        self._ledger = ledger
        self._edits = EditBlocks(ledger)
        self._blame = Blame(ledger, place)
        self._points = points
        self.early = EarlyReports(ledger, place)
        self.early_blocks = EarlyBlocks(ledger, place)
        self._link = link
        self._num_resumed = 0
        self._parcel = Parcel()
        # Whether the step that runs now holds a request with a block, failed or not. It follows
        # from the scheduler's output: all ranks run it eagerly, or none.
        self.is_eager = False
        self._batch: list[tuple[TracedRequest, int]] = []
        # These, and those whose block is over: what the last stage looks at when it has sampled.
        self._in_step: list[TracedRequest] = []

    @property
    def is_tracing(self) -> bool:
        """Whether the step that runs now holds a traced request."""
        return bool(self._batch)

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits and samples."""
        return self.place.stage == self.place.num_stages - 1

    @contextmanager
    def reading(self, doing: str) -> Iterator[None]:
        """Let what fails in a `with`, as vLLM is not as we know it, fail requests with a block.

        The step then goes on as vLLM runs it, without them. All ranks read alike, and fail alike.
        """
        try:
            yield
        except Exception as error:
            self._blame.unread(doing, error)
            self.end_step()

    # -- before the forward --------------------------------------------------------------------

    def is_concerned(self, output: Any) -> bool:
        """Whether the step holds a request with a block; alike on every rank. Call it for each."""
        self.is_eager = False
        self._batch, self._in_step = [], []
        if type(output) is StepPlan:
            self.early.forget(output.came_home)
        for company in self._ledger.companies.values():
            company.ended.update(compat.ended(output))
        is_known = len(self._ledger) > 0 and any(
            self._ledger.get(request) is not None or request in self._edits
            for request in compat.request_ids(output)
        )
        self.is_eager = is_known or any(
            compat.carried(new) is not None for new in compat.new_requests(output)
        )
        return self.is_eager

    def begin_step(self, output: Any) -> None:
        """Take in new requests, bring awaited values, and open the step of each traced request."""
        together: dict[str, list[tuple[TracedRequest, compat.Scheduled]]] = {}
        items = compat.scheduled(output)
        for item in items:
            is_new = self._ledger.get(item.request) is None and compat.carried(item.new) is not None
            traced = None
            try:
                for edit in self._edits.of(item):
                    self._open(edit, item, is_new=is_new)
                traced = _take_in(self._ledger, item) if is_new else self._ledger.get(item.request)
            except Exception as error:
                self._blame.broke("taking in a request", error)
            if traced is None and is_new:
                self._turns.agree(item.request, is_new=True, has_failed=True)
            elif traced is not None and traced.company is None:
                self._num_resumed += item.is_resumed
                self._open(traced, item, is_new=is_new)
            elif traced is not None and traced.company is not None:
                self._in_step.append(traced)
                beside = together.setdefault(traced.company.name, [])
                beside += [(traced, item)] if traced.error is None else []
        for name, members in together.items():
            company = self._ledger.companies[name]
            is_new = not company.is_started
            try:
                if members:
                    self._open_together(sorted(members, key=lambda member: member[0].seat))
            except Exception as error:
                self._blame.broke("opening a step", error, *[traced for traced, _ in members])
            first = company.in_order()[0]
            failed = first.error is not None
            self._turns.agree(first.request, is_new=is_new, has_failed=failed)
        for traced in self._in_step:
            traced.most_in_step = max(traced.most_in_step, len(items))

    def _open(self, traced: TracedRequest, item: compat.Scheduled, *, is_new: bool) -> None:
        self._in_step.append(traced)
        try:
            if traced.error is None:
                self._batch.append((traced, item.step))
                self._turns.catch_up(traced.request)
                self._ledger.check_whole(traced, item, str(self.place))
            if traced.error is None:
                self._turns.open_step(traced.request, item.step)
        except Exception as error:
            self._blame.broke("opening a step", error, traced)
        self._turns.agree(traced.request, is_new=is_new, has_failed=traced.error is not None)

    def _open_together(self, members: list[tuple[TracedRequest, compat.Scheduled]]) -> None:
        """Do for the requests of one company, which are in order, what others get one by one."""
        company = members[0][0].company
        assert company is not None
        refusal = company.refusal([item for _, item in members], str(self.place))
        if refusal is not None:
            self._ledger.fail(members[0][0], refusal)
            return
        if not company.is_started:
            self._ledger.start(company)
        company.timeline.settle()
        for traced, item in members:
            self._num_resumed += item.is_resumed
            self._ledger.check_whole(traced, item, str(self.place))
        if all(traced.error is None for traced, _ in members):
            self._batch += [(traced, item.step) for traced, item in members]
            company.timeline.open_step([one.request for one, _ in members], members[0][1].step)

    # -- in the forward ------------------------------------------------------------------------

    def enter_forward(self, rows: list[tuple[str, int, int]], total: int) -> None:
        """Arm the serve points, each traced request with its rows of ``total``."""
        places = {request: (start, end) for request, start, end in rows}
        for traced, step in self._batch:
            if traced.rows_of in places:
                start, end = places[traced.rows_of]
                # A preempted request is recomputed as one slab: its step's rows are the last.
                count = traced.prompt_len if step == 0 else 1
                traced.cut_to(Rows(max(start, end - count), min(count, end - start), total))
        self._points.open(self._serve, self._turns)

    def leave_forward(self, rows: list[tuple[str, int, int]]) -> None:
        """Close the step; on the last stage go on to its logits, one row for each request."""
        if not self.is_last:
            self.end_step()
            return
        places = {request: index for index, (request, _, _) in enumerate(rows)}
        for traced, _ in self._batch:
            if traced.rows_of in places:
                traced.cut_to(Rows(places[traced.rows_of], 1, len(rows)))

    def end_step(self) -> None:
        """Disarm the serve points and close the step of each traced request."""
        self._points.shut()
        for traced, step in self._batch:
            traced.cut_to(None)
            try:
                self._turns.close_step(traced.request, step)
            except Exception as error:
                self._blame.broke("closing a step", error, traced)
        self.early.add(self._batch)
        self._batch = []

    def take_ended(self) -> tuple[str, ...]:
        """Return the requests of the step whose blocks have raised or stopped.

        Also where another stage has said so by now: only the scheduler is told, which tells all.
        """
        in_step, self._in_step = self._in_step, []
        return tuple(
            one.rows_of for one in in_step if one.is_over_early or _is_lost(one, self._link)
        )

    def serve_logits(self, logits: Any) -> Any:
        """Offer the step's logits ``[requests, vocabulary]``; return what is sampled from."""
        return self._serve(LOGITS, logits)

    def serve_samples(self, samples: Any, num_ids: int) -> Any:
        """Offer the sampled ids ``[requests, 1]``; return those that the engine goes on with."""
        for traced, _ in self._batch:
            if traced.worker is not None and isinstance(traced.worker.cut, TokenCut):
                traced.worker.cut = TokenCut(traced.worker.cut.rows, num_ids)
        return self._serve(SAMPLES, samples)

    def model_failed(self, error: Exception) -> None:
        """Blame an exception of the model's own code on the step's blocks, and serve no more.

        The step is computed again without them, so that nobody else has to pay.
        """
        self._points.shut()
        self._blame.model_failed(error, [traced for traced, _ in self._batch])

    def _serve(self, location: Location, value: Any) -> Any:
        try:
            if location.kind == "skip":
                self._turns.skips.hold(location)
                return value
            value = self._turns.serve(location, value)
            self._ledger.past_edits.note(location, self._batch)
            return value
        except Exception as error:
            self._blame.broke(f"serving {location}", error, *[traced for traced, _ in self._batch])
            return value

    # -- after a request -----------------------------------------------------------------------

    def collect(self, wanted: list[tuple[str, bytes | None]]) -> bytes | dict[str, Any]:
        """End the requests of these traces; return this stage's reports, or where they are."""
        values = {trace: result and pickle.loads(result) for trace, result in wanted}
        reports, ended = _closed(self._ledger, self._blame, self.place, values)
        try:
            return encode_reports(reports, self._parcel)
        finally:
            # Only now: it wakes the link's threads, who would take the interpreter meanwhile.
            for traced in ended:
                self._ledger.forget(traced)
            self._edits.forget_ended()

    def fetch(self, is_wanted: bool) -> bytes:
        """Drop the last report that was too large for an answer; return its bytes where wanted."""
        try:
            return self._parcel.read() if is_wanted and not self._parcel.is_empty else b""
        finally:
            self._parcel.drop()

    def statistics(self) -> dict[str, Any]:
        """Return what is alive on this rank, the releases of ended requests waited for."""
        link = {} if self._link is None else _settled(self._link, len(self._ledger))
        return {"stage": self.place.stage, "tp_rank": self.place.tp_rank, "pid": os.getpid()} | {
            "tracked": len(self._ledger),
            "resumed": self._num_resumed,
            "observed": len(self._turns.observers.at),
            "parcels": int(self._parcel.is_large),
            **self._turns.statistics(),
            **link,
        }

    def stop(self) -> None:
        """Leave the link."""
        if self._link is not None:
            self._link.stop()
            self._link.join(2.0)


def _closed(
    ledger: Ledger, blame: Blame, place: Place, values: dict[str, Any]
) -> tuple[list[Report], list[TracedRequest]]:
    """Close the requests of some traces; return the reports, and who is to be forgotten yet."""
    reports: list[Report] = []
    ended: list[TracedRequest] = []
    # What one has changed another may have to tell: all end before any is reported on.
    for trace, value in values.items():
        for traced in ledger.requests(trace):
            if traced.company is None:
                ledger.end(traced, value)
    for trace, value in values.items():
        known = ledger.requests(trace)
        reports += [] if known else blame.reports(trace, place.stage)
        for traced in known:
            if traced.company is None:
                reports.append(ledger.close(traced, value))
                ended.append(traced)
            else:
                reports += ledger.close_company(traced.company, values)
    return (reports if place.is_lead else [as_witness(one) for one in reports]), ended


def _settled(link: GlooLink, num_tracked: int) -> dict[str, Any]:
    """Return the link's gauges, once the releases of ended requests are in or overdue."""
    deadline = time.monotonic() + _SETTLE_S
    while link.statistics()["shelves"] > num_tracked and time.monotonic() < deadline:
        time.sleep(0.002)
    return link.statistics()


def _take_in(ledger: Ledger, item: compat.Scheduled) -> TracedRequest | None:
    payload = compat.carried(item.new)
    assert payload is not None
    trace, data, member, last_step = pickle.loads(payload)
    if data is None:
        return None  # it has stored edits only
    if member is not None:
        return ledger.add_member(item.request, trace, item.new.prompt_len, data, member)
    given = TracedRequest(item.request, trace, item.new.prompt_len)
    traced = ledger.add(given, data)
    traced.last_step = last_step
    return traced


def _is_lost(traced: TracedRequest, link: GlooLink | None) -> bool:
    """Whether its block has raised on another stage; a company ends as a whole by itself."""
    if link is None or traced.company is not None:
        return False
    return link.has_failed_elsewhere(traced.request)
