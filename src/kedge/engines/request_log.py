"""Make the record of each request of a run from its events: opened by the plan, completed at its end."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from msgspec.structs import asdict, replace

from kedge.engines.content_filter import ContentFilters
from kedge.engines.request_metrics import count_end, count_request, log, log_request
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
    """Whether several processes may receive a response in the background, and ``confirm`` says which one was first."""
    has_output = False
    """Whether the first output of the current answer is recorded."""
    _open: dict[str, Any] | None = None
    """The members of the record of the current request so far."""
    _is_sent_earlier = False
    _healed = ""
    _unmatched = 0
    _started_at = 0.0
    _taken = 0
    _deferred: RequestRecord | None = None

    def __init__(self, engine: "Engine", request: Request, *, is_written: bool = True) -> None:
        self.is_written = is_written
        self.provider, self.filters = engine.name, request.filters
        self.model = request.model or engine.model
        """The requested model; the answer names the one that was used."""
        self.plans: list[RequestPlan] = []
        """The plan of every request that this run sends, in order."""
        self.records: list[RequestRecord] = []
        """The record of every request that has ended, in order."""
        given = request.params
        self._settings = self._encode_settings(given) if given else ""

    @property
    def current(self) -> RequestRecord:
        """The record of the current request, or of the last one."""
        return RequestRecord(**self._open) if self._open else self.records[-1]

    def record_event(self, event: Event) -> None:
        """Open, change or complete the record of the current request."""
        if record := self._recorders.get(type(event)):
            record(self, event)

    def _record_plan(self, event: run_events.RequestPlanned) -> None:
        self._open = self._start(event.plan)
        if event.running:
            self._continue(event.plan, event.running)
        else:
            self.plans.append(event.plan)

    def _record_edit(self, event: run_events.TurnEdited) -> None:
        if event.by == "repair":
            removed = event.diff.removed
            self._unmatched += sum(isinstance(each, ToolResultBlock) for each in removed)

    def _record_sent(self, event: run_events.RequestSent) -> None:
        if self._open:
            size, full = event.body_bytes, event.full_bytes
            self.plans[-1] = replace(self.plans[-1], body_bytes=size)
            self._open.update(sent_bytes=size, saved_bytes=full - size)

    def _record_response(self, event: ResponseStarted) -> None:
        if self._open:
            self._open["provider_response_id"] = event.response_id
            if event.background:
                self._open["status"] = "running"

    def _record_output(self, _: Event) -> None:
        if self._open and not self.has_output:
            self.has_output = True
            if not self._is_sent_earlier:
                self._open["first_token_seconds"] = time.perf_counter() - self._started_at

    def _record_answer(self, event: run_events.AnswerFinished) -> None:
        if self._open is None:  # an engine that reports no plan
            self._open = self._start(event.plan)
        self._end(self.complete(event.outcome, event.turn))

    def _record_attempt(self, event: run_events.AttemptFailed) -> None:
        problem = f"{event.error.__name__}; the request was sent again"
        self._fail(_classify_error(event.error), problem, event)

    def _record_healing(self, event: run_events.Healed) -> None:
        status = "refused" if 400 <= (event.status or 0) < 500 else "failed"
        self._fail(status, HEALING_TEXTS[event.reason], event)
        self._healed = event.reason

    def record_error(self, error: EngineError) -> None:
        """Complete the record of a request that failed."""
        message = self.filters.edit_text(str(error))[:MAX_ERROR_LENGTH]
        is_running = self._in_background and error.turn and find_running(error.turn)
        status = "running" if is_running else _classify_error(type(error))
        self._fail(status, message, error)

    def stop(self) -> None:
        """Complete the record of a request whose answer is not read to its end; in the background it continues."""
        if self._open:
            self._fail("running" if self._in_background else "cancelled", "")

    @property
    def _in_background(self) -> bool:
        return self._open is not None and self._open["status"] == "running"

    def complete(self, outcome: Outcome, turn: Turn) -> RequestRecord:
        """Return the record of the current request with its answer, which is at the end of this Turn."""
        members: dict[str, Any] = {
            "provider_response_id": outcome.response_id,
            "model": outcome.model or self.model,
            "status": "running" if outcome.status == "running" else "completed",
        }
        anchor = get_state(turn).anchor(outcome.response_id) if outcome.response_id else None
        if anchor:
            members.update(
                zip(request_record.ANCHOR_MEMBERS, _get_anchor_members(anchor), strict=True)
            )
            if anchor.status == "lost":
                members.update(status="lost", lost_reason="forgot")
        return self._finish(members, outcome.usage)

    def _continue(self, plan: RequestPlan, response_id: str) -> None:
        """Open the record of a request that was sent earlier; without what was sent if that is not known."""
        self._is_sent_earlier = True
        found = request_record.find_request(plan.source) if isinstance(plan.source, Turn) else None
        unknown = RequestRecord(
            provider=self.provider,
            scope=plan.scope,
            provider_response_id=response_id,
            model=self.model,
            status="running",
            created_at=self.current.created_at,
        )
        self._open = asdict(found or unknown)

    def _start(self, plan: RequestPlan) -> dict[str, Any]:
        self._started_at, self.has_output = time.perf_counter(), False
        self._is_sent_earlier = False
        matches, sent_blocks = plan.count_results(), plan.delta_blocks
        members: dict[str, Any] = {
            "provider": self.provider,
            "scope": plan.scope,
            "model": self.model,
            "mode": plan.mode,
            "status": "completed",
            "seconds": 0.0,
            "created_at": self.clock(),
            "stored": plan.mode != "stateless",
            "anchor": plan.anchor_id,
            "reason": plan.reason,
            "healed": self._healed,
            "sent_blocks": sent_blocks,
            "saved_blocks": plan.full_blocks - sent_blocks,
            "predicted_cached_tokens": plan.cache.cached_tokens if plan.cache else None,
            "settings": self._settings,
            "results_by_id": matches.get("id", 0),
            "results_by_fallback": matches.get("fallback", 0),
            "results_unmatched": self._unmatched,
            "start": plan.body_start,
            "omitted": plan.list_omitted()[: request_record.MAX_OMITTED],
        }
        self._healed, self._unmatched = "", 0
        if plan.rejected:
            members |= _describe_rejected(plan)
        return members

    def _fail(
        self,
        status: request_record.ResponseStatus,
        error: str,
        source: run_events.AttemptFailed | run_events.Healed | EngineError | None = None,
    ) -> None:
        if self._open is not None:
            members = {"status": status, "error": error}
            if source and source.response_id:
                members["provider_response_id"] = source.response_id
            self._end(self._finish(members, source.usage if source else None))

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
            count_end(record)
            if log.isEnabledFor(logging.INFO):
                with bind_fields(**self.ids):
                    log_request(record)

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

    def _finish(self, further: Mapping[str, Any], usage: Usage | None) -> RequestRecord:
        """Return the record of the current request with its duration, further members, the tokens and their cost."""
        members = {**cast("dict[str, Any]", self._open), **further}
        members["seconds"] += time.perf_counter() - self._started_at
        if usage is None:
            return RequestRecord(**members)
        from kedge.prices import current_prices  # which takes time to import

        model, at = members["model"], members["created_at"]
        listed = current_prices().find_at(usage, self.provider, model, at)
        members.update(zip(_TOKEN_MEMBERS, _get_tokens(usage), strict=True))
        if listed:
            members.update(cost=listed.cost(usage), cache_savings=listed.cache_savings(usage))
        record = RequestRecord(**members)
        return replace(record, cost=self.price(record)) if self.price else record

    def _encode_settings(self, params: Mapping[str, Any]) -> str:
        """Return the settings after the filters, as JSON; values that are not JSON are converted to text."""
        settings = {name: params[name] for name in params if name in KNOWN_PARAMS}
        if not settings:
            return ""
        values = json.loads(json.dumps(settings, default=to_encodable))
        return json.dumps(filter_json(values, self.filters), ensure_ascii=False)

    _recorders: ClassVar[Mapping[type[Event], Callable[[Self, Any], None]]] = {
        run_events.RequestPlanned: _record_plan,
        run_events.TurnEdited: _record_edit,
        run_events.RequestSent: _record_sent,
        ResponseStarted: _record_response,
        run_events.AnswerFinished: _record_answer,
        run_events.AttemptFailed: _record_attempt,
        run_events.Healed: _record_healing,
        **dict.fromkeys(run_events.VISIBLE_EVENTS, _record_output),
    }
    """The events that change records."""


def _describe_rejected(plan: RequestPlan) -> dict[str, Any]:
    """Return the members about responses that would have saved more and could not be continued."""
    limit = request_record.MAX_REJECTED
    rejected = tuple(
        request_record.RejectedCandidate(
            each.response_id, each.reason, describe_rejection(each, plan)
        )
        for each in plan.rejected[:limit]
    )
    return {"rejected": rejected, "more_rejected": max(len(plan.rejected) - limit, 0)}


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
