"""``trace``: OpenTelemetry spans of a run, its requests and its tools (extra ``otel``).

    invoke_agent                     the run, from the Turn that is sent to the Turn that is returned
    ├── chat gpt-5.1                 one request and its answer
    ├── execute_tool get_weather     one tool
    ├── chat gpt-5.1
    └── fetch_response gpt-5.1       the answer to a request that an earlier run sent in the background

It should be the outermost middleware. It only observes events; while the inner engine runs, the run's
span is the current one, so that spans of an HTTP client or of a tool nest below it. Without an OpenTelemetry
SDK set up by the program, its API does nothing. Spans have no content unless it is enabled, by
``content=True`` or by the variable of OpenTelemetry's other GenAI instrumentations. Attributes with names ``gen_ai.…``
are those of OpenTelemetry's GenAI conventions; ``kedge.…`` are values that the conventions do not define.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import time_ns
from typing import TYPE_CHECKING, Any

from kedge._internal.argument_types import checked
from kedge._internal.arguments import read_variable
from kedge.engines.base import Events, Middleware, unwrap
from kedge.engines.request import Request
from kedge.engines.request_log import RequestLog
from kedge.engines.stack import BaseMiddleware
from kedge.errors import AnswerIncomplete, Blocked, CannotConnect, EngineError, describe_extra
from kedge.events import Event, Outcome
from kedge.events import run as run_events
from kedge.events.request_record import RequestRecord
from kedge.observe.logs import BOUND_FIELDS
from kedge.observe.otel import MessageDict, system_parts, to_messages
from kedge.planning import RequestPlan, get_state
from kedge.planning.plan import is_fallback_reason
from kedge.turns import Block, ToolCallBlock, Turn
from kedge.turns.frozen_json import EMPTY

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

CAPTURE_CONTENT_ENV = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that enables content."""
CAPTURE_ENABLED_VALUES = frozenset({"true", "1", "span_only", "span_and_event"})
"""Its values, in lower case, that enable content in spans."""

PROVIDER_NAMES = {"xai": "x_ai", "azure": "azure.ai.openai"}
"""Names of providers in the conventions where they differ from Kedge's."""
_REQUEST_ATTRIBUTES = {
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
}
_FAILED_OUTCOMES = frozenset({"failed", "timeout", "invalid", "unknown", "cancelled", "refused"})


@checked
def trace(
    tracer: "Tracer | None" = None, *, content: bool | None = None, agent: str = ""
) -> Middleware:
    """Create OpenTelemetry spans for each run, its requests and its tools.

    Args:
        tracer: The tracer to use; by default the program's.
        content: Whether spans have messages, arguments and results, filtered by guards; by default the value
            of the environment variable ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT``.
        agent: The name of the agent, for the span of the run.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        CannotConnect: OpenTelemetry's API is not installed.
    """
    resolved_tracer = tracer or _get_tracer()
    if content is None:
        content = read_variable(CAPTURE_CONTENT_ENV).lower() in CAPTURE_ENABLED_VALUES

    return lambda engine: _TraceMiddleware(engine, resolved_tracer, content, agent)


def _get_tracer() -> "Tracer":
    try:
        from opentelemetry.trace import get_tracer
    except ImportError as error:
        raise CannotConnect(describe_extra("otel")) from error
    return get_tracer("kedge")


@dataclass(eq=False, repr=False)
class _TraceMiddleware(BaseMiddleware):
    name = "trace"
    tracer: "Tracer"
    content: bool
    agent: str

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, and create spans for them."""
        from opentelemetry.trace import use_span

        spans = _RunSpans(self, turn, request)
        quiet: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False}
        try:
            async with aclosing(self.inner.events(turn, request)) as events:
                while True:
                    # The span is current for one step only: between two events, the caller's span is current.
                    with use_span(spans.run, **quiet):
                        event = await anext(events, None)
                    if event is None:
                        break
                    spans.record(event)
                    yield event
        except BaseException as error:
            spans.fail(error)
            raise
        finally:
            spans.end()


class _RunSpans:
    """The spans of one run in progress; those of its requests have the values of their records."""

    def __init__(self, trace: _TraceMiddleware, turn: Turn, request: Request) -> None:
        engine = unwrap(trace.inner)
        self.tracer = trace.tracer
        self.content = trace.content
        self.request = request
        self.requests = RequestLog(engine, request, is_written=False)
        self.model = self.requests.model
        provider = PROVIDER_NAMES.get(engine.name, engine.name) or "unknown"
        conversation = find_conversation_id(turn)
        self.common = {"gen_ai.provider.name": provider, "gen_ai.conversation.id": conversation}
        names = {"gen_ai.request.model": self.model, "gen_ai.agent.name": trace.agent}
        self.run = self._start_span("invoke_agent", trace.agent, names, parent=None)
        self.request_span: Span | None = None
        self.tool_spans: dict[str, tuple[Span, int]] = {}

    def record(self, event: Event) -> None:
        """Open and close spans for an event."""
        if self.requests.has_output and isinstance(event, run_events.VISIBLE_EVENTS):
            return
        if isinstance(event, run_events.RequestPlanned):
            # A request without an answer is one that an inner middleware repeats.
            self._close_request("retried")
        self.requests.record_event(event)
        match event:
            case run_events.RequestPlanned(plan, running):
                self._start_request(plan, "fetch_response" if running else "chat")
            case run_events.AnswerFinished(outcome):
                self._record_output(_find_finish_reason(outcome), outcome.blocks)
                self._close_request("", {"gen_ai.response.model": outcome.model})
            case run_events.AttemptFailed():
                self._discard_response(event.response_id, "retried")
            case run_events.Healed(reason):
                self.run.add_event("kedge.healed", {"kedge.healed.reason": reason})
                self._discard_response(event.response_id, f"healed:{reason}")
            case run_events.ToolStarted():
                self._start_tool(event)
            case run_events.ToolFinished():
                self._end_tool(event)
            case run_events.TurnFinished(turn):
                _set(self.run, {"gen_ai.conversation.id": find_conversation_id(turn)})
            case _:
                pass

    def fail(self, error: BaseException) -> None:
        """Mark open spans as failed, with the type of the error, because its message may quote content."""
        kind = _error_type(error)
        if isinstance(error, GeneratorExit):
            kind = "cancelled"
        if isinstance(error, EngineError):
            self.requests.record_error(error)
            if error.response_id:
                self._record_output(_find_failure_reason(error), error.partial)
        else:
            self.requests.stop()
            if self.request_span is not None and self.requests.current.status == "running":
                # The run was left, and its answer may be generated in the background.
                self._close_request("")
        self._close_request(kind)
        _mark_error(self.run, kind)

    def end(self) -> None:
        """Close all open spans."""
        self._close_request("")
        for span, _ in self.tool_spans.values():
            _mark_error(span, "cancelled")
            span.end()
        self.tool_spans.clear()
        self.run.end()

    def _start_request(self, plan: RequestPlan, operation: str) -> None:
        from opentelemetry.trace import SpanKind

        params = self.request.params
        attributes = {
            "gen_ai.request.model": self.model,
            "gen_ai.request.stream": self.request.streaming,
            **{ours: params.get(theirs) for theirs, ours in _REQUEST_ATTRIBUTES.items()},
            **_describe_request(self.requests.current),
        }
        if self.content:
            instructions = plan.instructions and self.request.filters.edit_text(plan.instructions)
            attributes["gen_ai.input.messages"] = _to_json(self._to_messages(plan.delta))
            attributes["gen_ai.system_instructions"] = _to_json(system_parts(instructions))
        self.request_span = self._start_span(
            operation, self.model, attributes, parent=self.run, kind=SpanKind.CLIENT
        )

    def _record_output(self, finish_reason: str, blocks: Iterable[Block]) -> None:
        """Record why an answer ended, and its blocks if content is enabled."""
        if self.request_span is None:
            return
        attributes: dict[str, Any] = {}
        if finish_reason:
            attributes["gen_ai.response.finish_reasons"] = [finish_reason]
        if self.content:
            messages = self._to_messages(blocks)
            finished = [{**message, "finish_reason": finish_reason} for message in messages]
            attributes["gen_ai.output.messages"] = _to_json(finished)
        _set(self.request_span, attributes)

    def _discard_response(self, response_id: str, error: str) -> None:
        if response_id:
            self._record_output("error", ())
        self._close_request(error)

    def _close_request(self, error: str, attributes: Mapping[str, Any] = EMPTY) -> None:
        """End the span of the current request with the values of its record and further attributes."""
        if self.request_span is None:
            return
        record = self.requests.current
        request_attributes = _describe_request(record)
        if self.request.streaming:
            request_attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_seconds
        _set(self.request_span, {**request_attributes, **attributes})
        if error:
            _mark_error(self.request_span, error)
        self.request_span.end()
        self.request_span = None

    def _start_tool(self, event: run_events.ToolStarted) -> None:
        call = event.call
        start = time_ns()
        attributes = {"gen_ai.tool.name": call.name, "gen_ai.tool.call.id": call.call_id}
        attributes["gen_ai.tool.type"] = "function"
        if self.content:
            arguments = self.request.filters.edit_text(call.arguments)
            attributes["gen_ai.tool.call.arguments"] = arguments
        span = self._start_span(
            "execute_tool", call.name, attributes, parent=self.run, start_time=start
        )
        self.tool_spans[call.id] = (span, start)

    def _end_tool(self, event: run_events.ToolFinished) -> None:
        span, start = self.tool_spans.pop(event.call.id, (None, 0))
        if span is None:
            return
        span.set_attribute("kedge.tool.outcome", event.outcome)
        if event.outcome in _FAILED_OUTCOMES:
            _mark_error(span, event.outcome)
        if self.content:
            result = self.request.filters.edit_text(event.result.text)
            span.set_attribute("gen_ai.tool.call.result", result)
        # Tools run concurrently and are reported together, so each span has a separate end time.
        span.end(start + int(event.seconds * 1e9))

    def _to_messages(self, blocks: Iterable[Block]) -> list[MessageDict]:
        """Return messages of the blocks after the guards of the stack."""
        allowed: list[Block] = []
        for block in blocks:
            with suppress(Blocked):  # the guard itself stops the run
                allowed.append(self.request.filters.apply(block))
        return to_messages(allowed)

    def _start_span(
        self,
        operation: str,
        subject: str,
        attributes: Mapping[str, Any],
        *,
        parent: "Span | None",
        **options: Any,
    ) -> "Span":
        from opentelemetry.trace import set_span_in_context

        context = None if parent is None else set_span_in_context(parent)
        all_attributes = {"gen_ai.operation.name": operation, **self.common, **attributes}
        name = f"{operation} {subject}".strip()
        return self.tracer.start_span(
            name, context, attributes=_drop_empty(all_attributes), **options
        )


def _describe_request(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a span with the values of a record, as far as they are known."""
    attributes: dict[str, Any] = {"gen_ai.response.id": record.provider_response_id}
    if record.is_known:
        attributes |= {
            "kedge.mode": record.mode,
            "kedge.anchor.id": record.anchor,
            "kedge.delta.blocks": record.sent_blocks,
            "kedge.full.blocks": record.full_blocks,
        }
        if is_fallback_reason(record.reason):
            attributes["kedge.fallback.reason"] = record.reason
    if record.sent_bytes:
        attributes |= {"kedge.sent.bytes": record.sent_bytes, "kedge.full.bytes": record.full_bytes}
    if record.usage:
        attributes |= {
            "gen_ai.usage.input_tokens": record.input_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": record.cache_write_tokens,
            "gen_ai.usage.reasoning.output_tokens": record.reasoning_tokens,
        }
    return attributes


def _find_finish_reason(outcome: Outcome) -> str:
    """Return the reason of a complete answer; empty if it is still generated in the background."""
    if outcome.status == "running":
        return ""
    has_calls = any(isinstance(block, ToolCallBlock) for block in outcome.blocks)
    return "tool_call" if has_calls else "stop"


def _find_failure_reason(error: EngineError) -> str:
    if not isinstance(error, AnswerIncomplete):
        return "error"
    return "content_filter" if error.code == "content_filter" else "length"


def find_conversation_id(turn: Turn) -> str:
    """Return the id of the conversation that a Turn belongs to, or an empty string."""
    return BOUND_FIELDS.get().get("conversation_id", "") or get_state(turn).conversation_id


def _drop_empty(attributes: Mapping[str, Any]) -> "dict[str, AttributeValue]":
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


def _set(span: "Span", attributes: Mapping[str, Any]) -> None:
    span.set_attributes(_drop_empty(attributes))


def _to_json(values: Iterable[Any]) -> str:
    entries = list(values)
    if not entries:
        return ""
    return json.dumps(entries, ensure_ascii=False)


def _error_type(error: BaseException) -> str:
    if isinstance(error, EngineError):
        if error.code:
            return error.code
        if error.status:
            return str(error.status)
    return type(error).__name__


def _mark_error(span: "Span", kind: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
