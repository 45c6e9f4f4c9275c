"""Convert the events of a run into rows of a store.

An ``AnswerFinished`` has the decoded outcome, the plan of its request, and the Turn with its anchor. The row
of a response is built only from these three and from measured times.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, cast

from kedge.engines.content_filter import ContentFilters
from kedge.errors import AnswerIncomplete, EngineError, RequestRefused, StreamCut
from kedge.events import Event, Usage
from kedge.events.run import (
    VISIBLE_EVENTS,
    AnswerFinished,
    AttemptFailed,
    Healed,
    ModeChanged,
    RequestPlanned,
    RequestSent,
    ServerForgot,
    ToolFinished,
)
from kedge.planning import RequestPlan, get_state
from kedge.prices import current_prices
from kedge.store import Incident, ResponseRow, StoredExchange, Telemetry, ToolRow
from kedge.store.records import NO_TELEMETRY, ResponseStatus
from kedge.text.display import HEALING_TEXTS
from kedge.text.json_text import escape_surrogates

MAX_ERROR_LENGTH = 500
WITHHELD_BODY = b"[not stored: guard rules apply, and this body is a stream]"

_RECORD_MEMBERS = (
    "scope", "stored", "created_at", "expires_at", "digest", "block_count", "depth",
    "root_created_at", "barrier", "derived", "counted",
)  # fmt: skip
"""The members of a row that have the same names and values as those of the anchor."""
_get_record_members = attrgetter(*_RECORD_MEMBERS)

CostFunction = Callable[[ResponseRow], float | None]
"""Returns the cost of a response, or None if it is not known."""


@dataclass(slots=True)
class RunRecorder:
    """Collects the data that a store records about the requests of one run."""

    provider: str
    model: str = ""
    """The requested model; the answer names the one that was used."""
    clock: Callable[[], float] = time.time
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings of the requests, such as the temperature."""
    requested_at: float = 0.0
    timer_start: float = 0.0
    first_token_seconds: float | None = None
    sent: RequestSent | None = None
    """The sizes of the last request; None until it is sent."""
    healed: str = ""
    plan: RequestPlan | None = None
    incidents: tuple[Incident, ...] = ()
    tools: tuple[ToolRow, ...] = ()
    exchanges: tuple[StoredExchange, ...] = ()
    filters: ContentFilters = field(default_factory=ContentFilters)
    costs: tuple[float | None, ...] = ()
    """The costs of all responses of the run that have token counts."""

    def record_exchange(self, request: bytes, reply: bytes, status: int | None) -> None:
        """Record the bodies of a request and its reply, after the guards of the stack."""
        if self.filters:
            request, reply = (_filter_body(body, self.filters) for body in (request, reply))
        self.exchanges = (*self.exchanges, StoredExchange(request, reply, status, self.clock()))

    def record_event(self, event: Event) -> None:
        """Record an event."""
        match event:
            case RequestPlanned():
                self.plan, self.first_token_seconds, self.sent = event.plan, None, None
                self.requested_at, self.timer_start = self.clock(), time.perf_counter()
            case RequestSent():
                self.sent = event
            case Healed():
                self.healed = event.reason
                self._record_incident("healed", event.reason)
            case ServerForgot():
                self._record_incident("forgot", "usage")
            case ModeChanged():
                self._record_incident("mode_changed", event.reason)
            case ToolFinished():
                run = ToolRow(event.call.name, event.outcome, event.seconds, self.clock())
                self.tools = (*self.tools, run)
            case _ if self.first_token_seconds is None and isinstance(event, VISIBLE_EVENTS):
                self.first_token_seconds = time.perf_counter() - self.timer_start
            case _:
                pass

    def drain_telemetry(self) -> Telemetry:
        """Return the data recorded since the last call."""
        if not (self.incidents or self.tools or self.exchanges):
            return NO_TELEMETRY
        accounts = Telemetry(self.incidents, self.tools, self.exchanges)
        self.incidents, self.tools, self.exchanges = (), (), ()
        return accounts

    def build_response_row(self, event: AnswerFinished, price: CostFunction | None) -> ResponseRow:
        """Return the row of a finished answer."""
        outcome, usage = event.outcome, event.outcome.usage
        record = get_state(event.turn).anchor(outcome.response_id) if outcome.response_id else None
        members = self._collect_members(event.plan, usage)
        members.update(
            provider_response_id=outcome.response_id,
            model=outcome.model or self.model,
            status="running" if outcome.status == "running" else "completed",
        )
        if record:
            members.update(zip(_RECORD_MEMBERS, _get_record_members(record), strict=True))
            if record.status == "lost":
                members.update(status="lost", lost_reason="forgot")
        return self._build_row(members, usage, price)

    def build_failure_row(
        self, error: EngineError, price: CostFunction | None
    ) -> ResponseRow | None:
        """Return the row of a failed request; None if no request was sent."""
        plan = error.plan or self.plan
        if plan is None:
            return None
        members = self._collect_members(plan, error.usage)
        message = self.filters.edit_text(str(error))[:MAX_ERROR_LENGTH]
        members.update(model=self.model, status=_classify_error(type(error)), error=message)
        return self._build_row(members, error.usage, price if error.usage else None)

    def build_retried_row(
        self, event: AttemptFailed | Healed, price: CostFunction | None
    ) -> ResponseRow | None:
        """Return the row of a request that is sent again; None if the server counted no tokens for it."""
        if isinstance(event, AttemptFailed):
            plan, status = event.plan or self.plan, _classify_error(event.error)
            error = f"{event.error.__name__}; the request was sent again"
        else:
            plan, status, error = self.plan, "failed", HEALING_TEXTS[event.reason]
        if plan is None or event.usage is None:
            return None
        members = self._collect_members(plan, event.usage)
        members.update(model=self.model, status=status, error=error)
        return self._build_row(members, event.usage, price)

    def build_cancelled_row(self) -> ResponseRow | None:
        """Return the row of a cancelled request; None if no request was sent."""
        if self.plan is None:
            return None
        members = self._collect_members(self.plan, None)
        return self._build_row({**members, "model": self.model, "status": "cancelled"})

    def _build_row(
        self, members: dict[str, Any], usage: Usage | None = None, price: CostFunction | None = None
    ) -> ResponseRow:
        """Return the row with these members and the cost of the tokens."""
        self.healed = ""
        if usage:
            created_at = members["created_at"]
            listed = current_prices().find_at(usage, self.provider, members["model"], created_at)
            if listed:
                members["cache_savings"] = listed.cache_savings(usage)
                members["cost"] = listed.cost(usage) if price is None else None
        row = ResponseRow(**members)
        row = replace(row, cost=price(row)) if price else row
        if usage:
            self.costs = (*self.costs, row.cost)
        return row

    def _collect_members(self, plan: RequestPlan, usage: Usage | None) -> dict[str, Any]:
        """Return the members of a row that every request has.

        The result is a dict and not a `ResponseRow`, because replacing members of such a large dataclass
        costs as much time as a database statement.
        """
        size = self.sent.body_bytes if self.sent else 0
        return {
            "provider": self.provider,
            "scope": plan.scope,
            "mode": plan.mode,
            "anchor": plan.anchor_id,
            "reason": plan.reason,
            "healed": self.healed,
            "sent_blocks": plan.delta_blocks,
            "sent_bytes": size,
            "saved_blocks": plan.full_blocks - plan.delta_blocks,
            "saved_bytes": self.sent.full_bytes - size if self.sent else 0,
            "input_tokens": usage.input_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "output_tokens": usage.output_tokens if usage else None,
            "reasoning_tokens": usage.reasoning_tokens if usage else None,
            "predicted_cached_tokens": plan.cache.cached_tokens if plan.cache else None,
            "cache_write_tokens": usage.cache_write_tokens if usage else None,
            "first_token_seconds": self.first_token_seconds,
            "seconds": time.perf_counter() - self.timer_start,
            "created_at": self.requested_at or self.clock(),
            "stored": plan.mode != "stateless",
            "settings": self._encode_settings(),
            "request_bytes": size,
        }

    def _encode_settings(self) -> str:
        """Return the settings after the guards of the stack; values that are not JSON are converted to text."""
        if not self.settings:
            return ""
        values = json.loads(json.dumps(dict(self.settings), default=str))
        return json.dumps(_filter_json(values, self.filters), ensure_ascii=False)

    def _record_incident(self, kind: str, reason: str) -> None:
        scope = self.plan.scope if self.plan else ""
        incident = Incident(kind, reason, scope, self.clock())  # pyright: ignore[reportArgumentType]
        self.incidents = (*self.incidents, incident)


def _filter_body(body: bytes, filters: ContentFilters) -> bytes:
    """Return a JSON body with its texts filtered; any other body is withheld.

    The text of a stream is split into pieces, in which patterns cannot be found.
    """
    if not body:
        return body
    try:
        filtered = json.dumps(_filter_json(json.loads(body), filters), ensure_ascii=False)
        return escape_surrogates(filtered).encode()
    except (ValueError, RecursionError):
        return WITHHELD_BODY


def _filter_json(value: Any, filters: ContentFilters) -> Any:
    match value:
        case str():
            return filters.edit_text(value)
        case list():
            return [_filter_json(each, filters) for each in cast("list[Any]", value)]
        case dict():
            members = cast("dict[str, Any]", value)
            return {name: _filter_json(each, filters) for name, each in members.items()}
        case _:
            return value


def _classify_error(error: type[EngineError]) -> ResponseStatus:
    if issubclass(error, RequestRefused):
        return "refused"
    if issubclass(error, StreamCut):
        return "cut"
    return "incomplete" if issubclass(error, AnswerIncomplete) else "failed"
