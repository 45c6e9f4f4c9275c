"""Make the record of each request of a run from its events: opened by the plan, completed at its end."""

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from kedge.engines.content_filter import ContentFilters
from kedge.engines.request_metrics import count_request, record_request
from kedge.engines.request_options import KNOWN_PARAMS, Request
from kedge.errors import AnswerIncomplete, EngineError, RequestRefused, StreamCut
from kedge.events import Event, Outcome, ResponseStarted, Usage, request_record
from kedge.events import run as run_events
from kedge.events.request_record import RequestRecord
from kedge.observe import bind_fields
from kedge.planning import RequestPlan, find_running, get_state
from kedge.planning.explain import describe_rejection
from kedge.text.display import HEALING_TEXTS
from kedge.turns import ToolResultBlock, Turn
from kedge.turns.frozen_json import EMPTY, to_encodable

if TYPE_CHECKING:
    from kedge.engines.base import Engine

MAX_ERROR_LENGTH = 500

CostFunction = Callable[[RequestRecord], float | None]
"""Returns the cost of a response, or None if it is not known."""


class RequestLog:
    """The records of the requests of one run, which are counted and written to the log.

    Args:
        engine: The engine that sends the requests.
        request: The request. Its filters edit settings, such as the temperature, and errors.
        is_written: Whether records are counted and written; not if another log of the same run does that.
    """

    ids: Mapping[str, str] = EMPTY
    """The ids of the run, for log records."""
    is_shared = False
    """Whether several processes may receive a response in the background, and ``confirm`` says which one was first."""
    _taken = 0
    _deferred: RequestRecord | None = None

    def __init__(self, engine: "Engine", request: Request, *, is_written: bool = True) -> None:
        self.is_written = is_written
        self.provider, self.filters = engine.name, request.filters
        self.model = request.model or engine.model
        """The requested model; the answer names the one that was used."""
        given = request.params
        self._settings = {name: given[name] for name in given if name in KNOWN_PARAMS}
        self.clock: Callable[[], float] = time.time
        self.price: CostFunction | None = None
        self.plans: list[RequestPlan] = []
        """The plan of every request that this run sends, in order."""
        self.records: list[RequestRecord] = []
        """The record of every request that has ended, in order."""
        self.has_output = False
        """Whether the first output of the current answer is recorded."""
        self._open: RequestRecord | None = None
        self._is_sent_earlier = False
        self._healed: run_events.HealReason | None = None
        self._unmatched = 0
        self._started_at = 0.0

    @property
    def current(self) -> RequestRecord:
        """The record of the current request, or of the last one."""
        return self._open or self.records[-1]

    def record_event(self, event: Event) -> None:
        """Open, change or complete the record of the current request."""
        match event:
            case run_events.RequestPlanned(plan, ""):
                self.plans.append(plan)
                self._open = self._start(plan)
            case run_events.RequestPlanned(plan, running):
                self._open = self._continue(plan, running)
            case run_events.TurnEdited("repair", diff):
                self._unmatched += sum(isinstance(each, ToolResultBlock) for each in diff.removed)
            case run_events.RequestSent() if self._open:
                self.plans[-1] = replace(self.plans[-1], body_bytes=event.body_bytes)
                saved = event.full_bytes - event.body_bytes
                self._open = replace(self._open, sent_bytes=event.body_bytes, saved_bytes=saved)
            case run_events.AnswerFinished():
                if self._open is None:  # an engine that reports no plan
                    self._open = self._start(event.plan)
                self._end(self.complete(event.outcome, event.turn))
            case run_events.AttemptFailed():
                problem = f"{event.error.__name__}; the request was sent again"
                self._fail(_classify_error(event.error), problem, event)
            case run_events.Healed(reason):
                status = "refused" if 400 <= (event.status or 0) < 500 else "failed"
                self._fail(status, HEALING_TEXTS[reason], event)
                self._healed = reason
            case ResponseStarted() if self._open:
                status = "running" if event.background else self._open.status
                self._open = replace(
                    self._open, provider_response_id=event.response_id, status=status
                )
            case _ if (
                self._open and isinstance(event, run_events.VISIBLE_EVENTS) and not self.has_output
            ):
                self.has_output, seconds = True, time.perf_counter() - self._started_at
                if not self._is_sent_earlier:
                    self._open = replace(self._open, first_token_seconds=seconds)
            case _:
                pass

    def record_error(self, error: EngineError) -> None:
        """Complete the record of a request that failed."""
        message = self.filters.edit_text(str(error))[:MAX_ERROR_LENGTH]
        is_running = self._in_background and error.turn and find_running(error.turn)
        status = "running" if is_running else _classify_error(type(error))
        self._fail(status, message, error)

    def stop(self) -> None:
        """Complete the record of a request whose answer is not read to its end; in the background it continues."""
        self._fail("running" if self._in_background else "cancelled", "")

    @property
    def _in_background(self) -> bool:
        return self._open is not None and self._open.status == "running"

    def complete(self, outcome: Outcome, turn: Turn) -> RequestRecord:
        """Return the record of the current request with its answer, which is at the end of this Turn."""
        members: dict[str, Any] = {
            "provider_response_id": outcome.response_id,
            "model": outcome.model or self.model,
            "status": "running" if outcome.status == "running" else "completed",
        }
        anchor = get_state(turn).anchor(outcome.response_id) if outcome.response_id else None
        if anchor:
            members.update({name: getattr(anchor, name) for name in request_record.ANCHOR_MEMBERS})
            if anchor.status == "lost":
                members.update(status="lost", lost_reason="forgot")
        return self._finish(outcome.usage, **members)

    def _continue(self, plan: RequestPlan, response_id: str) -> RequestRecord:
        """Return the record of a request that was sent earlier; without what was sent if that is not known."""
        started = self._start(plan)
        self._is_sent_earlier = True
        found = request_record.find_request(plan.source) if isinstance(plan.source, Turn) else None
        return found or RequestRecord(
            provider=self.provider,
            scope=plan.scope,
            provider_response_id=response_id,
            model=self.model,
            status="running",
            created_at=started.created_at,
        )

    def _start(self, plan: RequestPlan) -> RequestRecord:
        self._started_at, self.has_output = time.perf_counter(), False
        self._is_sent_earlier = False
        healed, self._healed = self._healed, None
        unmatched, self._unmatched = self._unmatched, 0
        matches, sent_blocks = plan.count_results(), plan.delta_blocks
        return RequestRecord(
            provider=self.provider,
            scope=plan.scope,
            model=self.model,
            mode=plan.mode,
            created_at=self.clock(),
            stored=plan.mode != "stateless",
            anchor=plan.anchor_id,
            reason=plan.reason,
            healed=healed or "",
            sent_blocks=sent_blocks,
            saved_blocks=plan.full_blocks - sent_blocks,
            predicted_cached_tokens=plan.cache.cached_tokens if plan.cache else None,
            settings=self._encode_settings() if self._settings else "",
            results_by_id=matches["id"],
            results_by_fallback=matches["fallback"],
            results_unmatched=unmatched,
            rejected=tuple(
                request_record.RejectedCandidate(
                    each.response_id, each.reason, describe_rejection(each, plan)
                )
                for each in plan.rejected[: request_record.MAX_REJECTED]
            ),
            more_rejected=max(len(plan.rejected) - request_record.MAX_REJECTED, 0),
            start=plan.body_start,
            omitted=plan.list_omitted()[: request_record.MAX_OMITTED],
        )

    def _fail(
        self,
        status: request_record.ResponseStatus,
        error: str,
        source: run_events.AttemptFailed | run_events.Healed | EngineError | None = None,
    ) -> None:
        if self._open is not None:
            named, usage = (source.response_id, source.usage) if source else ("", None)
            response_id = named or self._open.provider_response_id
            members = {"status": status, "error": error, "provider_response_id": response_id}
            self._end(self._finish(usage, **members))

    def _end(self, record: RequestRecord) -> None:
        is_deferred = self.is_shared and self._in_background
        self.records.append(record)
        self._open = None
        if not self.is_written:
            return
        if not self._is_sent_earlier and record.sent_bytes:
            anchor = self.plans[-1].anchor if self.plans else None
            count_request(record, anchor.depth if anchor else 0)
        if is_deferred:
            self._deferred = record
        elif self._is_sent_earlier or record.sent_bytes:
            self._write(record)

    def _write(self, record: RequestRecord) -> None:
        if record.status != "running":
            with bind_fields(**self.ids):
                record_request(record)

    def take(self) -> RequestRecord | None:
        """Return the record of the last request, if it has ended since the last call."""
        known, self._taken = self._taken, len(self.records)
        return self.records[-1] if self._taken > known else None

    def confirm(self, stored: RequestRecord | None) -> None:
        """Count a response in the background that is now stored, or use the record that another process stored."""
        record, self._deferred = self._deferred, None
        if record and stored is None:
            self._write(record)
        elif stored is not None:
            self.records[-1] = stored

    def _finish(self, usage: Usage | None, **members: Any) -> RequestRecord:
        """Return the record of the current request with its duration, its tokens and their cost, and with members."""
        record = cast("RequestRecord", self._open)
        seconds = record.seconds + time.perf_counter() - self._started_at
        record = replace(record, seconds=seconds, **members)
        if usage is None:
            return record
        from kedge.prices import current_prices  # which takes time to import

        listed = current_prices().find_at(usage, self.provider, record.model, record.created_at)
        record = replace(
            record,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            cost=listed.cost(usage) if listed else None,
            cache_savings=listed.cache_savings(usage) if listed else None,
        )
        return replace(record, cost=self.price(record)) if self.price else record

    def _encode_settings(self) -> str:
        """Return the settings after the filters; values that are not JSON are converted to text."""
        values = json.loads(json.dumps(self._settings, default=to_encodable))
        return json.dumps(filter_json(values, self.filters), ensure_ascii=False)


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


def _classify_error(error: type[EngineError]) -> request_record.ResponseStatus:
    if issubclass(error, RequestRefused):
        return "refused"
    if issubclass(error, StreamCut):
        return "cut"
    return "incomplete" if issubclass(error, AnswerIncomplete) else "failed"
