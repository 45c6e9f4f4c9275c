"""The record, the log records and the metrics of each request of an engine.

A ``RequestLog`` makes the records of a run from its events: a record is opened by the plan and completed at its end,
where it is counted and written to the log. A ``PromptMonitor`` reports changes between requests that prevent prompt
caching.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from kedge._internal.bounded_dict import BoundedDict
from kedge.engines.params import KNOWN_PARAMS
from kedge.engines.request import Request
from kedge.errors import AnswerIncomplete, EngineError, RequestRefused, StreamCut
from kedge.events import Event, Outcome, ResponseStarted, Usage, request_record
from kedge.events import run as run_events
from kedge.events.request_record import RequestRecord
from kedge.observe import bind_fields, count, get_logger
from kedge.observe.metrics import Value, measure_all
from kedge.planning import RejectedAnchor, RequestPlan, find_running, get_state, prefix_digest
from kedge.planning.anchors import WAITING_STATUSES, is_unusable_status
from kedge.planning.cache_plan import CACHE_HINTS, CacheHint, CachePlan, PromptHead
from kedge.planning.explain import describe_rejection
from kedge.planning.plan import is_fallback_reason
from kedge.turns import ToolResultBlock, Turn
from kedge.turns.content_filters import ContentFilters
from kedge.turns.frozen_json import EMPTY, to_encodable
from kedge.wire.items import ItemTable

if TYPE_CHECKING:
    from kedge.engines.base import Engine
    from kedge.store.proxied_requests import ChainedRequest

log = get_logger("kedge.engines")

MAX_ERROR_LENGTH = 500
MAX_CODE_LENGTH = 100
MAX_REMEMBERED_PROMPTS = 256

CostFunction = Callable[[RequestRecord], float | None]
"""Returns the cost of a response, or None if it is not known."""

Status = request_record.ResponseStatus
FailureSource = run_events.AttemptFailed | run_events.Healed | EngineError


class _Failure(NamedTuple):
    """How a request ended without an answer."""

    status: Status
    message: str = ""
    code: str = ""


_REPLACED = "replaced by a middleware"
_TOKEN_MEMBERS = (
    "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cache_write_tokens",
)  # fmt: skip
_get_tokens = attrgetter(*_TOKEN_MEMBERS)
_get_anchor_members = attrgetter(*request_record.ANCHOR_MEMBERS)


class RequestLog:
    """The records of the requests of one run, which are counted and written to the log.

    Args:
        engine: The engine that sends the requests.
        request: The request. Its filters edit settings, such as the temperature, and errors.
        is_written: Whether records are counted and written; not if another log of the same run does that.
    """

    ids: Mapping[str, str] = EMPTY
    """The ids of the run, for log records."""
    clock: Callable[[], float] = staticmethod(time.time)
    price: CostFunction | None = None
    is_shared = False
    """Whether several processes may receive a background response; ``settle_background`` says which was first."""
    has_output = False
    """Whether the first output of the current answer is recorded."""
    _open: RequestRecord | None = None
    """The record of the current request so far."""
    _is_sent_earlier = False
    _healed = ""
    _unmatched = 0
    _started_at = 0.0
    _popped_count = 0
    """The number of records at the last call of ``pop_finished``."""
    _deferred: RequestRecord | None = None

    def __init__(self, engine: "Engine", request: Request, *, is_written: bool = True) -> None:
        self.is_written = is_written
        self.provider = engine.name
        self.filters = request.filters
        self.model = request.model or engine.model
        """The requested model; the answer names the one that was used."""
        self.plans: list[RequestPlan] = []
        """The plan of every request that this run sends, in order."""
        self.records: list[RequestRecord] = []
        """The record of every request that has ended, in order."""
        from kedge.usage.prices import current_prices  # which takes time to import

        self._prices = current_prices()  # after an answer, an error in their file would lose it
        self._settings = self._encode_settings(request.params)

    @property
    def current(self) -> RequestRecord:
        """The record of the current request, or of the last one."""
        return self._open or self.records[-1]

    def record_event(self, event: Event) -> None:
        """Open, change or complete the record of the current request."""
        record = self._open
        match event:
            case run_events.RequestPlanned(plan, running):
                self._start(plan)
                if running:
                    self._continue(plan, running)
                else:
                    self.plans.append(plan)
            case run_events.TurnEdited("repair", changes):
                self._unmatched += sum(isinstance(b, ToolResultBlock) for b in changes.removed)
            case run_events.RequestSent(size, full, request) if record:
                self.plans[-1] = replace(self.plans[-1], body_bytes=size)
                self._open = replace(
                    record, sent_bytes=size, saved_bytes=full - size, sent_request=request
                )
            case ResponseStarted() if record:
                record = replace(record, provider_response_id=event.response_id)
                if event.background:
                    record = replace(record, status="running")
                self._open = record
            case run_events.AnswerFinished(outcome, turn, plan):
                if record is None:  # an engine that reports no plan
                    self._start(plan)
                self._end(self.complete(outcome, turn))
            case run_events.AttemptFailed(error):
                failure = _Failure(_classify_error(error), event.message, event.code)
                self._fail(failure, event, is_resent=True)
            case run_events.Healed(reason):
                failure = _Failure(_classify_healing(event), event.message, event.code)
                self._fail(failure, event, is_resent=True)
                self._healed = reason
            case _ if record and isinstance(event, run_events.VISIBLE_EVENTS):
                self._record_output(record)
            case _:
                pass

    def _record_output(self, record: RequestRecord) -> None:
        """Record when the first output of an answer arrived; not of an answer that was requested earlier."""
        if self.has_output:
            return
        self.has_output = True
        if not self._is_sent_earlier:
            seconds = time.perf_counter() - self._started_at
            self._open = replace(record, first_token_seconds=seconds)

    def record_error(self, error: EngineError) -> None:
        """Complete the record of a request that failed."""
        status = _classify_error(type(error))
        waiting = None
        if self._in_background and error.turn:
            waiting = find_running(error.turn)
        if waiting is not None:
            status = "unknown" if waiting.status == "unknown" else "running"
        self._fail(_Failure(status, str(error), error.reported_code), error)

    def stop(self) -> None:
        """Complete the record of a request whose answer is not read to its end; in the background it continues."""
        if self._in_background:
            self._fail(_Failure("running"))
        elif self._open:
            self._fail(_Failure("cancelled"))

    @property
    def _in_background(self) -> bool:
        return self._open is not None and self._open.status == "running"

    def complete(self, outcome: Outcome, turn: Turn) -> RequestRecord:
        """Return the record of the current request with its answer, which is at the end of this Turn."""
        response_id = outcome.response_id
        anchor = get_state(turn).anchor(response_id)
        if not response_id and anchor and anchor.digest != prefix_digest(turn):
            anchor = None  # the record of an earlier answer without an id
        members: dict[str, Any] = {}
        if anchor:
            values = _get_anchor_members(anchor)
            members = dict(zip(request_record.ANCHOR_MEMBERS, values, strict=True))
        members["status"] = "running" if outcome.status == "running" else "completed"
        if anchor and anchor.status == "lost":
            members.update(status="lost", lost_reason="forgot")
        elif anchor and is_unusable_status(anchor.status):
            members["unusable_reason"] = anchor.status
        members.update(provider_response_id=response_id, model=outcome.model or self.current.model)
        return self._finish(members, outcome.usage)

    def _continue(self, plan: RequestPlan, response_id: str) -> None:
        """Open the record of a request that was sent earlier; without what was sent if that is not known."""
        self._is_sent_earlier = True
        sent_earlier = None
        if isinstance(plan.source, Turn):
            sent_earlier = request_record.find_request(plan.source)
        self._open = sent_earlier or RequestRecord(
            provider=self.provider,
            scope=plan.scope,
            provider_response_id=response_id,
            model=self.model,
            status="running",
            created_at=self.current.created_at,
        )

    def _start(self, plan: RequestPlan) -> None:
        if self._in_background:
            self._fail(_Failure("running", _REPLACED))
        elif self._open:  # a middleware has caught its error, or did not read its answer
            self._fail(_Failure("failed", _REPLACED), is_resent=True)
        self._started_at = time.perf_counter()
        self.has_output = False
        self._is_sent_earlier = False
        sent_blocks = plan.delta_blocks
        matches = plan.count_results()
        rejected = plan.rejected[: request_record.MAX_REJECTED]
        self._open = RequestRecord(
            provider=self.provider,
            scope=plan.scope,
            model=self.model,
            mode=plan.mode,
            created_at=self.clock(),
            stored=plan.mode != "stateless",
            anchor=plan.anchor_id,
            reason=plan.reason,
            healed=self._healed,
            sent_blocks=sent_blocks,
            saved_blocks=plan.full_blocks - sent_blocks,
            predicted_cached_tokens=plan.cache and plan.cache.cached_tokens,
            settings=self._settings,
            results_by_id=matches.get("id", 0),
            results_by_fallback=matches.get("fallback", 0),
            results_unmatched=self._unmatched,
            start=plan.body_start,
            omitted=plan.list_omitted()[: request_record.MAX_OMITTED],
            rejected=tuple(_describe_candidate(candidate, plan) for candidate in rejected),
            more_rejected=len(plan.rejected) - len(rejected),
        )
        self._healed = ""
        self._unmatched = 0

    def _fail(
        self, failure: "_Failure", source: FailureSource | None = None, *, is_resent: bool = False
    ) -> None:
        """Complete the record of the current request, if there is one, with a failure and what its source knows."""
        if self._open is None:
            return
        members: dict[str, Any] = {
            "status": failure.status,
            "error": self.filters.edit_text(failure.message)[:MAX_ERROR_LENGTH],
            "error_code": self.filters.edit_text(failure.code)[:MAX_CODE_LENGTH],
            "is_resent": is_resent,
        }
        usage = None
        if source is not None:
            usage = source.usage
            if source.response_id:
                members["provider_response_id"] = source.response_id
        self._end(self._finish(members, usage))

    def _end(self, record: RequestRecord) -> None:
        is_deferred = self.is_shared and self._in_background
        self.records.append(record)
        self._open = None
        if not self.is_written:
            return
        if not self._is_sent_earlier and record.sent_bytes:
            count_request(record, self._get_chain_depth())
        if is_deferred:
            self._deferred = record
        elif self._is_sent_earlier or record.sent_bytes:
            self._write(record)

    def _get_chain_depth(self) -> int:
        """Return the number of responses that the last request continues."""
        if not self.plans or self.plans[-1].anchor is None:
            return 0
        return self.plans[-1].anchor.depth

    def _write(self, record: RequestRecord) -> None:
        if record.status not in WAITING_STATUSES:
            count_end(record)
            if log.isEnabledFor(logging.INFO):
                with bind_fields(**self.ids):
                    log_request(record)

    def pop_finished(self) -> RequestRecord | None:
        """Return the record of the last request, if it has ended since the last call."""
        if len(self.records) == self._popped_count:
            return None
        self._popped_count = len(self.records)
        return self.records[-1]

    def settle_background(self, stored: RequestRecord | None) -> None:
        """Count a response in the background that is now stored, or use the record that another process stored."""
        deferred = self._deferred
        self._deferred = None
        if stored is not None:
            self.records[-1] = stored
        elif deferred is not None:
            self._write(deferred)

    def _finish(self, further: Mapping[str, Any], usage: Usage | None) -> RequestRecord:
        """Return the record of the current request with its duration, further members, the tokens and their cost."""
        record = cast("RequestRecord", self._open)
        seconds = record.seconds + time.perf_counter() - self._started_at
        record = replace(record, seconds=seconds, **further)
        if record.status not in WAITING_STATUSES:  # its answer is judged
            record = replace(record, sent_request=None)
        if usage is None:
            return record
        members: dict[str, Any] = dict(zip(_TOKEN_MEMBERS, _get_tokens(usage), strict=True))
        price = self._prices.find_at(usage, record.provider, record.model, record.created_at)
        if price:
            members.update(cost=price.cost(usage), cache_savings=price.cache_savings(usage))
        record = replace(record, **members)
        if self.price is not None:
            record = replace(record, cost=_compute_cost(self.price, record))
        return record

    def _encode_settings(self, params: Mapping[str, Any]) -> str:
        """Return the settings after the filters, as JSON; values that are not JSON are converted to text."""
        settings = {name: params[name] for name in params if name in KNOWN_PARAMS}
        if not settings:
            return ""
        values = json.loads(json.dumps(settings, default=to_encodable))
        return json.dumps(filter_json(values, self.filters), ensure_ascii=False)


def _compute_cost(price: CostFunction, record: RequestRecord) -> float | None:
    """Return the cost of a response, or None if the program's function fails: the answer must not be lost."""
    try:
        cost = price(record)
        if cost is None:
            return None
        dollars = float(cost)
    except Exception:
        log.exception(
            "the price of a response could not be computed; its cost is stored as unknown"
        )
        return None
    if not math.isfinite(dollars):
        return None
    return dollars


def _describe_candidate(
    candidate: RejectedAnchor, plan: RequestPlan
) -> request_record.RejectedCandidate:
    """Return what a record says about a response that would have saved more and could not be continued."""
    description = describe_rejection(candidate, plan)
    return request_record.RejectedCandidate(candidate.response_id, candidate.reason, description)


def filter_json(value: Any, filters: ContentFilters) -> Any:
    """Return a JSON value with all its texts filtered."""
    match value:
        case str():
            return filters.edit_text(value)
        case list():
            return [filter_json(each, filters) for each in cast("list[Any]", value)]
        case dict():
            members = cast("dict[str, Any]", value)
            return {name: filter_json(each, filters) for name, each in members.items()}
        case _:
            return value


def _classify_healing(event: run_events.Healed) -> Status:
    """Return the status of a request that is sent again: refused, or answered in a way that cannot be used."""
    if event.status is not None:
        is_rejected = 400 <= event.status < 500
    else:  # a stream reports a rejection as an event, without a status
        is_rejected = event.reason in _REJECTION_REASONS
    return "refused" if is_rejected else "failed"


_REJECTION_REASONS = frozenset({"gone", "unsupported", "reasoning", "include", "empty_input"})
"""The reasons for healing that are always rejections; for the others, the answer may lack its context."""


def _classify_error(error: type[EngineError]) -> Status:
    if issubclass(error, RequestRefused):
        return "refused"
    if issubclass(error, StreamCut):
        return "cut"
    if issubclass(error, AnswerIncomplete):
        return "incomplete"
    return "failed"


_CODES = """
    context_length_exceeded conversation_locked insufficient_quota invalid_api_key invalid_encrypted_content
    invalid_prompt invalid_request_error invalid_type invalid_value missing_required_parameter model_not_found
    previous_response_not_found rate_limit_exceeded server_error unknown_parameter unsupported_parameter
    unsupported_value
"""
KNOWN_CODES = frozenset(_CODES.split())
"""The codes that are counted by name. Servers may send any code, and the number of labels must be small."""


_SENT_MEMBERS = (
    "mode", "anchor", "reason", "healed", "sent_blocks", "full_blocks", "sent_bytes", "full_bytes",
)  # fmt: skip
_LOGGED_MEMBERS = (
    "provider", "model", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost", "status",
    "error_code", "is_resent", "seconds",
)  # fmt: skip
"""The members of a record that are fields of its log record."""


class _Prompt(msgspec.Struct):
    head: PromptHead
    reported: set[CacheHint] = set()


class PromptMonitor:
    """Remembers the head of the newest prompt of each conversation, and reports changes that prevent caching."""

    def __init__(self) -> None:
        self._prompts = BoundedDict[str, _Prompt](MAX_REMEMBERED_PROMPTS)

    def find_hints(self, key: str, head: PromptHead) -> tuple[CacheHint, ...]:
        """Return the changes since the newest prompt of a conversation."""
        newest = self._prompts.get(key)
        if newest is None:
            return ()
        return tuple(head.compare(newest.head))

    def record(self, cache: CachePlan, head: PromptHead) -> None:
        """Record a prompt that is sent; log each hint once per conversation."""
        newest = self._prompts.get(cache.key) or _Prompt(head)
        self._prompts[cache.key] = newest
        newest.head = head
        for hint in cache.hints:
            count("prompt_cache_hints_total", hint=hint)
            if hint not in newest.reported and cache.lost_tokens:
                log.warning("prompt caching is prevented: %s", CACHE_HINTS[hint])
                newest.reported.add(hint)


def count_request(record: RequestRecord, chain_depth: int) -> None:
    """Count a request that was sent.

    Args:
        record: The record of the request.
        chain_depth: The number of responses that it continues.
    """
    values: list[Value] = [
        ("tool_results_total", record.results_by_id, (("outcome", "by_id"),)),
        ("tool_results_total", record.results_by_fallback, (("outcome", "by_fallback"),)),
        ("tool_results_total", record.results_unmatched, (("outcome", "unmatched"),)),
    ]
    if is_fallback_reason(record.reason):
        values.append(("responses_fallback_total", 1, (("reason", record.reason),)))
    if record.first_token_seconds is not None:
        values.append(("responses_first_output_seconds", record.first_token_seconds, ()))
    full_bytes = record.sent_bytes + record.saved_bytes
    count_sent(record, full_bytes, ("responses_chain_depth", chain_depth, ()), *values)


def count_sent(record: "RequestRecord | ChainedRequest", full_bytes: int, *further: Value) -> None:
    """Count what was sent of a request, beside the size of the complete one, and record further values."""
    kind = "stateless"
    if record.is_refused:
        kind = "refused"
    elif record.anchor:
        kind = "chained"
    measure_all(
        (f"responses_{kind}_requests_total", 1, ()),
        ("responses_delta_blocks_count", record.sent_blocks, ()),
        ("responses_bytes_sent_total", record.sent_bytes, ()),
        ("responses_bytes_full_total", full_bytes, ()),
        *further,
    )


def count_end(record: "RequestRecord | ChainedRequest") -> None:
    """Count the tokens of a request that has ended, and how long a request of an engine took."""
    values: list[Value] = [
        ("tokens_total", record.input_tokens or 0, (("kind", "input"),)),
        ("tokens_total", record.cached_tokens or 0, (("kind", "cached"),)),
        ("tokens_total", record.output_tokens or 0, (("kind", "output"),)),
    ]
    if isinstance(record, RequestRecord) and record.status in ("completed", "lost"):
        values.append(("responses_duration_seconds", record.seconds, ()))
    measure_all(*values)


def log_request(record: RequestRecord) -> None:
    """Write the log record of a request that has ended, with all figures."""
    fields = {name: getattr(record, name) for name in _LOGGED_MEMBERS}
    fields["response_id"] = record.provider_response_id
    if not record.is_known:
        log.info("request %s", record.status, **fields)
        return
    fields |= {name: getattr(record, name) for name in _SENT_MEMBERS}
    sent = f"{record.sent_bytes} of {record.full_bytes} bytes"
    if not record.is_refused:
        sent = f"{record.send_label}, {sent}"
    log.info("request %s: %s", record.status, sent, **fields)


def record_error(error: EngineError) -> None:
    """Record that the server rejected a request, failed, or could not be reached."""
    kind = type(error).__name__
    code = error.reported_code or kind
    label = code
    if error.code and error.code not in KNOWN_CODES:
        label = "other"
    count("responses_rejected_total", code=label)
    log.error("request failed: %s, %s", kind, code, request_id=error.request_id)


def record_healing(reason: str, response_id: str) -> None:
    """Record a rejected request that is sent again in another form."""
    count("responses_healed_total", reason=reason)
    log.warning("healing a request: %s", reason, response_id=response_id)


def record_lost_context(response_id: str) -> None:
    """Record that the server answered without the requested context, and the answer was shown."""
    count("responses_forgotten_total")
    log.warning(
        "the server answered without the requested context; the answer may be wrong, and "
        "later requests will send everything",
        response_id=response_id,
    )


def record_calls(calls: ItemTable) -> None:
    """Count the calls of a finished response by how their ids were determined."""
    measure_all(
        ("tool_call_ids_total", calls.extracted, (("outcome", "extracted"),)),
        ("tool_call_ids_total", calls.fallen_back, (("outcome", "fallen_back"),)),
        ("tool_call_ids_total", calls.failed, (("outcome", "failed"),)),
        ("tool_call_names_inferred_total", calls.inferred, ()),
    )
