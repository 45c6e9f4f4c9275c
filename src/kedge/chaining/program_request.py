"""One request of a program and its response: rewrite, judge, observe and report.

The transport of a chained client, or of the proxy, owns the connection; these modules make the decisions:

1. `Chainer.examine` decides which body to send first.
2. If the server has not proved yet that it uses stored context, `ProgramRequest.probe` checks the items it lists.
3. For a rewritten request, `ResponseObserver.verdict` is whether the server rejected the chain or answered without
   it. Nothing has been passed to the program at that point, so the body that the program wrote is sent instead, once.
   `ProgramRequest.heal` records the first request.
4. The rest of the response is passed on byte for byte and observed. `ProgramRequest.end` records it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kedge.chaining import rewrite
from kedge.chaining.observer import ResponseObserver
from kedge.chaining.report import ChainedRequest
from kedge.chaining.rewrite import ParsedRequest, Rewritten
from kedge.engines.request_log import (
    MAX_CODE_LENGTH,
    MAX_ERROR_LENGTH,
    record_healing,
    record_lost_context,
)
from kedge.engines.stored_items import Audit, JsonSource, audit_blocks
from kedge.events import Outcome
from kedge.evidence.judge import Judgment, MemoryCheck, Way
from kedge.evidence.server_evidence import read_identity
from kedge.observe import get_logger
from kedge.planning import RequestPlan
from kedge.planning.anchor_index import IndexedResponse
from kedge.planning.digests import is_compaction
from kedge.store.proxied_requests import COUNTED_TOKENS
from kedge.turns import Block

if TYPE_CHECKING:
    from kedge.chaining.chainer import Chainer

log = get_logger("kedge.chaining")


@dataclass(slots=True)
class WireRequest:
    """A request on the wire that has ended: its record, its body, and the retained start of the response.

    Bytes that follow the last event of a response are still added to its start.
    """

    record: ChainedRequest
    body: bytes
    response_start: bytearray


@dataclass(frozen=True, slots=True)
class _Rejection:
    """The rejection of an anchor: the request, how the server rejected it (see `heal_rules`), and when."""

    rewritten: Rewritten
    kind: str
    time: float


@dataclass(slots=True)
class ProgramRequest:
    """One `POST /responses` request of a program, which is one request on the wire, or two if it is healed.

    Attributes:
        chainer: The chainer that examined it.
        scope: The endpoint and account.
        original: The body that the program wrote.
        parsed: The parsed body.
        check: The check of the server's memory.
        rewritten: The rewritten request, unless there is none or it was healed.
        reason: Why the request is sent as written; empty if it was rewritten.
        pending: The entry of the response that is fetched, for a `GET`; such a request is not reported.
        healed: The reason if the original body was sent after a rewritten one; otherwise empty.
        credentials: The credentials of the request, which records must not contain.
        ended: The requests on the wire that have ended.
        observer: The observer of the response, unless there is none yet.
        retained_bytes: The bytes of the response that the observer retains.
        body: The body of the response as received, if it was read completely before it is passed on.
        is_finished: Whether the request was reported.
    """

    chainer: "Chainer"
    scope: str
    original: bytes
    parsed: ParsedRequest
    check: MemoryCheck
    rewritten: Rewritten | None
    reason: str
    pending: IndexedResponse | None = None
    healed: str = ""
    credentials: Sequence[str] = ()
    retained_bytes: int = 0
    ended: list[WireRequest] = field(default_factory=list[WireRequest], init=False)
    body: bytes | None = field(default=None, init=False)
    is_finished: bool = field(default=False, init=False)
    observer: ResponseObserver | None = field(default=None, init=False)
    _rejection: _Rejection | None = field(default=None, init=False)
    _judgment: Judgment | None = field(default=None, init=False)
    _outcome: Outcome | None = field(default=None, init=False)
    _problem: str = field(default="", init=False)
    _started: float = field(default_factory=time.perf_counter, init=False)

    @property
    def content(self) -> bytes:
        """The body to send now."""
        if self.rewritten:
            return self.rewritten.content
        return self.original

    @property
    def anchor_id(self) -> str:
        """The response that the request continues, by the decision of Kedge or of the program itself."""
        if self.rewritten:
            return self.rewritten.anchor.record.response_id
        return self.parsed.previous_response_id

    # A server that has not shown yet that it remembers.

    @property
    def needs_probe(self) -> bool:
        """Whether the server must first prove that it stores the context that the request relies on."""
        return self.rewritten is not None and self.check.way == "probe"

    async def probe(self, source: JsonSource) -> Audit:
        """Compare the items that the server lists for the anchor with those of the program.

        Args:
            source: The source of JSON below the URL of the responses.

        Returns:
            The result, for `record_probe`.
        """
        if self.rewritten is None:
            return Audit(None)
        return await audit_blocks(
            source,
            self.parsed.blocks,
            self.rewritten.anchor.record,
            lists_items=self.check.evidence.audits,
            normalize=rewrite.normalize_block,
        )

    def record_probe(self, audit: Audit) -> None:
        """Record the result of a probe, and decide again whether the request is sent as written."""
        self.check.record_probe(audit.agrees)
        self.chainer.save_evidence(self.check)
        rewritten = self.rewritten
        if rewritten and decide_way(rewritten, self.parsed, self.check) not in ("direct", "held"):
            log.info("the server is not chained on: %s", audit)
            self.distrust()

    def distrust(self) -> None:
        """Send the request as written, because the server has not shown that it remembers."""
        self.rewritten = None
        self.reason = "untrusted"

    # The response.

    def observe(self, status: int, headers: Mapping[str, str]) -> ResponseObserver:
        """Return the observer of the response with this status and these headers (lower-case names)."""
        self.chainer.evidence.identify(self.check, read_identity(headers))
        expected = ""
        must_judge = False
        if self.rewritten:
            expected = self.rewritten.anchor.record.response_id
            must_judge = self.check.way == "held"
        self.observer = ResponseObserver(
            headers,
            expected,
            status=status,
            must_judge=must_judge,
            streaming=self.parsed.streaming,
            retained_bytes=self.retained_bytes,
            max_bytes=self.chainer.max_response_bytes,
            credentials=self.credentials,
        )
        return self.observer

    def end(self, *, early: bool = False, problem: str = "") -> None:
        """Record a response that was read to its end, or report a request without one. Later calls have no effect.

        Args:
            early: Whether the program has stopped reading, or the request failed. Clients may stop at the last
                event, and a response that is generated in the background is also generated without a reader.
            problem: The type of the exception for which there is no response.
        """
        if self.is_finished:
            return
        self._outcome = None
        observer = self.observer
        has_ended = not early or self.reason == "background"
        if observer and (has_ended or observer.is_complete):
            self._judge(observer)
            if observer.verdict == "resend" and not early:
                return  # `heal` records it
        self._problem = problem
        self._finish(self._outcome)

    def _judge(self, observer: ResponseObserver) -> None:
        """Decide whether a response that has ended may be passed on."""
        self._outcome = observer.finish()
        if self._outcome and self.rewritten:
            self._judgment = self.check.judge(self._outcome)
            if self._judgment.resend:
                observer.resend(self._judgment.reason)
            observer.release()

    def heal(self) -> None:
        """Record the request and abandon its anchor; from now on `content` is the body that the program wrote.

        The reason is `rejected` if the server rejected the anchor, `forgot` if it answered without the
        stored context, and `unproven` if it did not show that it used it.
        """
        observer = self.observer
        rewritten = self.rewritten
        if observer is None or rewritten is None:
            return
        # A stream that rejects the anchor is not read to its end.
        outcome = self._outcome or observer.finish()
        record = self._make_record(outcome, is_resent=True)
        is_judged = self._judgment is not None
        self.healed = observer.reason
        self.rewritten = None
        self.observer = None
        self.body = None
        self._judgment = None

        response_id = rewritten.anchor.record.response_id
        record_healing(self.healed, response_id)
        if self.healed == "rejected":
            # If the original request is rejected as well, this was not because of the anchor.
            self._rejection = _Rejection(rewritten, observer.rejection, self.chainer.clock())
        elif self.healed == "forgot":
            if not is_judged:
                self.check.record_forgotten()
            self.chainer.index.mark_lost(self.scope, response_id)
        self.chainer.save_evidence(self.check)
        self.chainer.report.add(record)

    # The records.

    def _finish(self, outcome: Outcome | None) -> None:
        """Record the response, if it became an anchor, and report the request with the tokens that were counted."""
        self.is_finished = True
        if self.pending is not None:
            self._complete_pending(self.pending, outcome)
            return
        is_context_used = outcome is None or self._record_response(outcome)
        is_lost = self.rewritten is not None and not is_context_used
        record = self._make_record(outcome, is_lost=is_lost)
        if self.observer:
            self._record_failure(self.observer)
        self.chainer.save_evidence(self.check)
        self.chainer.report.add(record)

    def _complete_pending(self, pending: IndexedResponse, outcome: Outcome | None) -> None:
        """Index a response that was generated in the background, now that its output is known."""
        if outcome is None or (self.observer is not None and self.observer.is_partial):
            return
        entry = rewrite.complete_response(pending, outcome)
        if entry is not None:
            self.chainer.index.add(self.scope, entry)

    def _make_record(
        self, outcome: Outcome | None, *, is_resent: bool = False, is_lost: bool = False
    ) -> ChainedRequest:
        """Make the record of the request on the wire that has ended."""
        ended_at = time.perf_counter()
        blocks = self.parsed.blocks
        record = ChainedRequest(
            created_at=self.chainer.clock(),
            model=self.parsed.model,
            status=0,
            anchor=self.anchor_id,
            response_id="",
            sent_blocks=len(self.rewritten.sent if self.rewritten else blocks),
            full_blocks=len(blocks),
            sent_bytes=len(self.content),
            full_bytes=len(self.original),
            reason=self.reason,
            healed=self.healed,
            is_resent=is_resent,
            is_lost=is_lost,
            seconds=ended_at - self._started,
        )
        if outcome is not None:
            tokens = {name: getattr(outcome.usage, name, None) for name in COUNTED_TOKENS}
            record = replace(record, response_id=outcome.response_id, **tokens)
        response_start = bytearray()
        if self.observer is not None:
            response_start = self.observer.body_start
            record = _add_response(record, self.observer)
        elif self._problem:
            record = replace(record, error=f"no response ({self._problem})")
        self.ended.append(WireRequest(record, self.content, response_start))
        self._started = ended_at
        return record

    def _record_failure(self, observer: ResponseObserver) -> None:
        """Record a failed anchor, if the original request succeeded or the program received the failure."""
        if self._rejection and not observer.has_failed:
            self._record_rejection(self._rejection)
        elif self.rewritten and observer.rejection:
            now = self.chainer.clock()
            self._record_rejection(_Rejection(self.rewritten, observer.rejection, now))
        elif self.rewritten and observer.has_server_error:
            self.check.record_error()

    def _record_rejection(self, rejection: _Rejection) -> None:
        """Record that the server rejected an anchor."""
        anchor = rejection.rewritten.anchor
        index = self.chainer.index
        older: list[str] = []
        if rejection.kind == "gone":
            # After a total loss, each older response would cost another rejected request.
            older = rewrite.find_shorter(self.parsed, index, anchor)
        self.check.record_rejection(rejection.kind, anchor.record.created_at, rejection.time)
        index.mark_lost(self.scope, anchor.record.response_id, *older)

    def _record_response(self, outcome: Outcome) -> bool:
        """Index the response and evaluate its token counts; return False if its context was lost."""
        if not self.parsed.is_observable:
            return True
        parent = self._find_parent()
        if self.rewritten is None:
            self.check.set_request(_to_plan(parent, self.parsed.blocks), self.parsed.values)
        judgment = self._judgment or self.check.judge(outcome)
        if judgment.reason:
            if self.rewritten and parent:
                self._record_lost_context(parent, judgment)
                record_lost_context(outcome.response_id)
            return False

        index = self.chainer.index
        entry = rewrite.index_response(
            self.parsed,
            outcome,
            scope=self.scope,
            now=self.chainer.clock(),
            parent=parent,
            retention=self.chainer.retention,
            counted=judgment.counted,
        )
        if entry is not None and index.add(self.scope, entry):
            # It is unknown which of the two responses the server has stored under this id.
            index.mark_lost(self.scope, entry.record.response_id)
            self.chainer.evidence.record_issued(self.check, entry.record.response_id, known=True)
        return True

    def _find_parent(self) -> IndexedResponse | None:
        """Return the response that the request continues, if it is known."""
        if self.rewritten:
            return self.rewritten.anchor
        if self.parsed.previous_response_id:
            return self.chainer.index.get(self.scope, self.parsed.previous_response_id)
        return None

    def _record_lost_context(self, anchor: IndexedResponse, judgment: Judgment) -> None:
        """Record that an answer was passed on although the server had not used the anchor."""
        index = self.chainer.index
        older: list[str] = []
        if not judgment.resend:
            older = rewrite.find_shorter(self.parsed, index, anchor)
        index.mark_lost(self.scope, anchor.record.response_id, *older)


def _add_response(record: ChainedRequest, observer: ResponseObserver) -> ChainedRequest:
    """Return a record with the status of the response and the error that it reports."""
    record = replace(record, status=observer.status, is_refused=observer.is_refused)
    error = observer.error
    if error is None:
        return record
    return replace(
        record,
        error_code=error.reported_code[:MAX_CODE_LENGTH],
        error=error.message[:MAX_ERROR_LENGTH],
    )


def decide_way(rewritten: Rewritten, parsed: ParsedRequest, check: MemoryCheck) -> Way:
    """Return how a rewritten request may use its anchor."""
    covered_end = parsed.prefixes.end_position(rewritten.anchor.record.block_count)
    plan = _to_plan(rewritten.anchor, rewritten.sent, parsed.blocks[:covered_end])
    return check.decide(plan, parsed.values)


def _to_plan(
    anchor: IndexedResponse | None, sent: Sequence[Block], covered: Sequence[Block] = ()
) -> RequestPlan:
    """Return the plan of a request that sends these items of the program on an anchor, which covers others of it."""
    if anchor is None:
        return RequestPlan("chained", "", None, tuple(sent))
    source = (*covered, *sent)
    # The model sees nothing of what a compaction replaces.
    compactions = (index for index, block in enumerate(source) if is_compaction(block))
    first = max(compactions, default=0)
    return RequestPlan(
        "chained",
        anchor.record.scope,
        anchor.record,
        source,
        start=len(covered),
        total_blocks=len(source) - first,
    )
