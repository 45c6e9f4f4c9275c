"""From what an engine tells to what a store keeps: one value travels from the wire to the row.

An ``AnswerFinished`` holds the outcome as it came over the wire, the plan by which it was asked for,
and the Turn with its anchor. The row is made of these three and of a watch; nothing is looked up
elsewhere, so nothing can be lost on the way.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kedge.errors import EngineError, RequestRefused, StreamCut
from kedge.events import Event, Usage
from kedge.events.run import (
    VISIBLE_EVENTS,
    AnswerFinished,
    Healed,
    ModeChanged,
    RequestPlanned,
    ServerForgot,
    ToolFinished,
)
from kedge.planning import RequestPlan, get_state
from kedge.prices import cost
from kedge.store import Incident, ResponseRow, StoredExchange, Telemetry, ToolRow
from kedge.store.records import ResponseStatus

MAX_ERROR_LENGTH = 500

CostFunction = Callable[[ResponseRow], float | None]
"""What a response cost, if that is known."""


@dataclass(slots=True)
class RunRecorder:
    """What is noted while a request is on its way."""

    provider: str
    model: str = ""
    """The model that is asked; the answer tells which it was."""
    clock: Callable[[], float] = time.time
    requested_at: float = 0.0
    timer_start: float = 0.0
    first_token_seconds: float | None = None
    healed: str = ""
    plan: RequestPlan | None = None
    incidents: tuple[Incident, ...] = ()
    tools: tuple[ToolRow, ...] = ()
    exchanges: tuple[StoredExchange, ...] = ()

    def record_exchange(self, request: bytes, reply: bytes, status: int | None) -> None:
        """Take what went over the wire into account."""
        self.exchanges = (*self.exchanges, StoredExchange(request, reply, status, self.clock()))

    def record_event(self, event: Event) -> None:
        """Take an event into account."""
        match event:
            case RequestPlanned():
                self.plan, self.first_token_seconds = event.plan, None
                self.requested_at, self.timer_start = self.clock(), time.perf_counter()
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
        """What happened since this was last asked for."""
        accounts = Telemetry(self.incidents, self.tools, self.exchanges)
        self.incidents, self.tools, self.exchanges = (), (), ()
        return accounts

    def build_response_row(self, event: AnswerFinished, price: CostFunction | None) -> ResponseRow:
        """The row of a finished answer."""
        outcome = event.outcome
        row = self._build_row(event.plan, outcome.usage)
        record = get_state(event.turn).anchor(outcome.response_id) if outcome.response_id else None
        row = replace(
            row,
            provider_response_id=outcome.response_id,
            model=outcome.model or self.model,
            status="completed",
        )
        if record:
            row = replace(
                row,
                scope=record.scope,
                status="lost" if record.status == "lost" else "completed",
                lost_reason="forgot" if record.status == "lost" else "",
                stored=record.stored,
                created_at=record.created_at,
                expires_at=record.expires_at,
                digest=record.digest,
                block_count=record.block_count,
                depth=record.depth,
                root_created_at=record.root_created_at,
                barrier=record.barrier,
                derived=record.derived,
            )
        self.healed = ""
        return replace(row, cost=price(row) if price else _compute_cost(row, outcome.usage))

    def build_failure_row(self, error: EngineError) -> ResponseRow | None:
        """The row of a request that came to nothing; ``None`` if none was made."""
        plan = error.plan or self.plan
        if plan is None:
            return None
        self.healed = ""
        return replace(
            self._build_row(plan, None),
            model=self.model,
            status=_classify_error(error),
            error=str(error)[:MAX_ERROR_LENGTH],
        )

    def _build_row(self, plan: RequestPlan, usage: Usage | None) -> ResponseRow:
        return ResponseRow(
            provider=self.provider,
            scope=plan.scope,
            mode=plan.mode,
            anchor=plan.previous_response_id,
            reason=_full_send_reason(plan, self.healed),
            healed=self.healed,
            sent_blocks=plan.delta_blocks,
            sent_bytes=plan.delta_bytes,
            saved_blocks=plan.full_blocks - plan.delta_blocks,
            saved_bytes=plan.full_bytes - plan.delta_bytes,
            input_tokens=usage.input_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else None,
            reasoning_tokens=usage.reasoning_tokens if usage else None,
            first_token_seconds=self.first_token_seconds,
            seconds=time.perf_counter() - self.timer_start,
            created_at=self.requested_at or self.clock(),
            stored=plan.mode != "stateless",
        )

    def _record_incident(self, kind: str, reason: str) -> None:
        scope = self.plan.scope if self.plan else ""
        incident = Incident(kind, reason, scope, self.clock())  # pyright: ignore[reportArgumentType]
        self.incidents = (*self.incidents, incident)


def _compute_cost(row: ResponseRow, usage: Usage | None) -> float | None:
    """By the current prices, at the time of the response."""
    return cost(usage, row.provider, row.model, at=row.created_at) if usage else None


def _full_send_reason(plan: RequestPlan, healed: str) -> str:
    """Why a request was chained on nothing, in a word."""
    if plan.anchor:
        return ""
    if healed:
        return healed
    return plan.fallback or ("new" if plan.mode == "chained" else plan.mode)


def _classify_error(error: EngineError) -> ResponseStatus:
    if isinstance(error, RequestRefused):
        return "refused"
    if isinstance(error, StreamCut):
        return "cut"
    return "incomplete" if type(error).__name__ == "AnswerIncomplete" else "failed"
