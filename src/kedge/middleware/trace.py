"""``trace``: OpenTelemetry spans of a run, its requests and its tools (extra ``otel``).

    invoke_agent                     the run: from the Turn that comes in to the Turn that goes out
    ├── chat gpt-5.1                 one request and its answer
    ├── execute_tool get_weather     one tool
    └── chat gpt-5.1

It belongs outermost. It only watches events, so it changes nothing of what it wraps; and while the inner
engine works, the run's span is the current one, so that spans of an HTTP client or of a tool nest below
it. Without an OpenTelemetry SDK set up by the program, its API does nothing. Spans hold no content
unless it is asked for, by ``content=True`` or as OpenTelemetry's other GenAI instrumentations are asked.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from kedge.engines.protocol import Engine, Events, Middleware, Request, innermost
from kedge.errors import CannotConnect, EngineError
from kedge.events import Event
from kedge.events.run import (
    SHOWN,
    AnswerFinished,
    FellBack,
    Healed,
    RequestPlanned,
    ToolFinished,
    ToolStarted,
    TurnFinished,
)
from kedge.middleware.wrapping import Wrapped
from kedge.observe import gen_ai
from kedge.observe.logs import BOUND
from kedge.observe.messages import system_parts, told_messages
from kedge.planning import RequestPlan, get_state
from kedge.turns import Turn

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

_PARAMS = {
    "max_output_tokens": gen_ai.REQUEST_MAX_TOKENS,
    "temperature": gen_ai.REQUEST_TEMPERATURE,
    "top_p": gen_ai.REQUEST_TOP_P,
}
_FINISHED = {"completed": "stop", "incomplete": "length", "failed": "error", "cut": "error"}
_TOOL_FAILED = frozenset({"failed", "timeout", "invalid", "unknown", "cancelled", "refused"})


def trace(
    tracer: "Tracer | None" = None, *, content: bool | None = None, agent: str = ""
) -> Middleware:
    """Make spans of what passes, with this tracer or the program's own.

    ``agent`` names what is run, in the span's name. ``content`` puts messages, arguments and results
    into the spans; by default the environment says (``gen_ai.CAPTURE`` is the variable's name).
    """
    made = tracer or _tracer()
    if content is None:
        content = os.environ.get(gen_ai.CAPTURE, "").strip().lower() in gen_ai.CAPTURING

    def wrap(engine: Engine) -> Engine:
        return _Trace(engine, made, content, agent)

    return wrap


def _tracer() -> "Tracer":
    try:
        from opentelemetry.trace import get_tracer
    except ImportError as error:
        raise CannotConnect("trace needs OpenTelemetry's API: pip install 'kedge[otel]'") from error
    return get_tracer("kedge")


class _Trace(Wrapped):
    name = "trace"

    def __init__(self, inner: Engine, tracer: "Tracer", content: bool, agent: str) -> None:
        super().__init__(inner)
        self.tracer, self.content, self.agent = tracer, content, agent

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events, as spans."""
        from opentelemetry.trace import use_span

        spans = _Spans(self, turn, request)
        quiet: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False}
        try:
            async with aclosing(self.inner.events(turn, request)) as events:
                while True:
                    # Current for one step only: between two events the caller's own span is.
                    with use_span(spans.run, **quiet):
                        event = await anext(events, None)
                    if event is None:
                        break
                    spans.see(event)
                    yield event
        except BaseException as error:
            spans.fail(error)
            raise
        finally:
            spans.end()


class _Spans:
    """The spans of one run while it is under way."""

    def __init__(self, trace: _Trace, turn: Turn, request: Request) -> None:
        from time import perf_counter

        engine = innermost(trace.inner)
        self.now = perf_counter
        self.tracer, self.content = trace.tracer, trace.content
        self.turn, self.request = turn, request
        self.model = request.model or str(getattr(engine, "model", ""))
        named = trace.agent
        self.common = _without_nothing(
            {
                gen_ai.PROVIDER: gen_ai.PROVIDERS.get(engine.name, engine.name) or "unknown",
                gen_ai.CONVERSATION_ID: conversation_of(turn),
            }
        )
        self.run = self._start(
            f"{gen_ai.INVOKE_AGENT} {named}" if named else gen_ai.INVOKE_AGENT,
            {
                gen_ai.OPERATION: gen_ai.INVOKE_AGENT,
                gen_ai.REQUEST_MODEL: self.model,
                "gen_ai.agent.name": named,
            },
        )
        self.asking: Span | None = None
        self.asked_at, self.shown = 0.0, True
        self.tools: dict[str, tuple[Span, int]] = {}

    def see(self, event: Event) -> None:
        """Open and close spans as an event tells."""
        match event:
            case RequestPlanned(plan):
                self._ask(plan)
            case AnswerFinished():
                self._answered(event)
            case FellBack(reason) if self.asking:
                self.asking.set_attribute(gen_ai.FALLBACK, reason)
            case Healed(reason):
                self.run.add_event("kedge.healed", {gen_ai.HEALED: reason})
                self._close_request(f"healed:{reason}")
            case ToolStarted():
                self._tool(event)
            case ToolFinished():
                self._tool_done(event)
            case TurnFinished(turn):
                self._finished(turn)
            case _ if not self.shown and isinstance(event, SHOWN) and self.asking:
                self.shown = True
                self.asking.set_attribute(gen_ai.FIRST_CHUNK, self.now() - self.asked_at)
            case _:
                pass

    def fail(self, error: BaseException) -> None:
        """Mark what was under way as failed, by the kind of the error: its words may quote."""
        kind = _kind(error)
        if isinstance(error, GeneratorExit):
            kind = "cancelled"
        self._close_request(kind)
        _mark(self.run, kind)

    def end(self) -> None:
        """Close whatever is open."""
        self._close_request("")
        for span, _ in self.tools.values():
            _mark(span, "cancelled")
            span.end()
        self.tools.clear()
        self.run.end()

    def _ask(self, plan: RequestPlan) -> None:
        from opentelemetry.trace import SpanKind

        self._close_request("")
        self.asked_at, self.shown = self.now(), False
        params = self.request.params
        self.asking = self._start(
            f"{gen_ai.CHAT} {self.model}".strip(),
            {
                gen_ai.OPERATION: gen_ai.CHAT,
                gen_ai.REQUEST_MODEL: self.model,
                gen_ai.REQUEST_STREAM: self.request.streaming,
                **{ours: params.get(theirs) for theirs, ours in _PARAMS.items()},
                gen_ai.MODE: plan.mode,
                gen_ai.ANCHOR: plan.previous_response_id,
                gen_ai.DELTA_BLOCKS: plan.delta_blocks,
                gen_ai.FULL_BLOCKS: plan.full_blocks,
                gen_ai.DELTA_BYTES: plan.delta_bytes,
                gen_ai.FULL_BYTES: plan.full_bytes,
                gen_ai.FALLBACK: plan.fallback,
            },
            kind=SpanKind.CLIENT,
        )
        if self.content:
            _put(self.asking, gen_ai.INPUT_MESSAGES, told_messages(plan.delta))
            _put(self.asking, gen_ai.SYSTEM_INSTRUCTIONS, system_parts(plan.instructions))

    def _answered(self, event: AnswerFinished) -> None:
        span, outcome = self.asking, event.outcome
        if span is None:
            return
        usage = outcome.usage
        told: dict[str, Any] = {
            gen_ai.RESPONSE_ID: outcome.response_id,
            gen_ai.RESPONSE_MODEL: outcome.model,
            gen_ai.FINISH_REASONS: [_FINISHED[outcome.status]],
        }
        if usage:
            told |= {
                gen_ai.INPUT_TOKENS: usage.input_tokens,
                gen_ai.OUTPUT_TOKENS: usage.output_tokens,
                gen_ai.CACHE_READ_TOKENS: usage.cached_tokens,
                gen_ai.CACHE_WRITE_TOKENS: usage.cache_write_tokens,
                gen_ai.REASONING_TOKENS: usage.reasoning_tokens,
            }
        span.set_attributes(_without_nothing(told))
        if self.content:
            _put(span, gen_ai.OUTPUT_MESSAGES, told_messages(outcome.blocks))
        self._close_request("" if outcome.completed else outcome.code or outcome.status)

    def _close_request(self, error: str) -> None:
        if self.asking is not None:
            if error:
                _mark(self.asking, error)
            self.asking.end()
            self.asking = None

    def _tool(self, event: ToolStarted) -> None:
        from time import time_ns

        call = event.call
        start = time_ns()
        span = self._start(
            f"{gen_ai.EXECUTE_TOOL} {call.name}",
            {
                gen_ai.OPERATION: gen_ai.EXECUTE_TOOL,
                gen_ai.TOOL_NAME: call.name,
                gen_ai.TOOL_CALL_ID: call.call_id,
                gen_ai.TOOL_TYPE: "function",
            },
            start_time=start,
        )
        if self.content:
            span.set_attribute(gen_ai.TOOL_ARGUMENTS, call.arguments)
        self.tools[call.id] = span, start

    def _tool_done(self, event: ToolFinished) -> None:
        span, start = self.tools.pop(event.call.id, (None, 0))
        if span is None:
            return
        span.set_attribute(gen_ai.OUTCOME, event.outcome)
        if event.outcome in _TOOL_FAILED:
            _mark(span, event.outcome)
        if self.content:
            span.set_attribute(gen_ai.TOOL_RESULT, event.result.text)
        # Tools run side by side and are told of together: each ended when it ended.
        span.end(start + int(event.seconds * 1e9))

    def _finished(self, turn: Turn) -> None:
        if conversation := conversation_of(turn):
            self.run.set_attribute(gen_ai.CONVERSATION_ID, conversation)

    def _start(self, name: str, attributes: Mapping[str, Any], **options: Any) -> "Span":
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self.run) if hasattr(self, "run") else None
        told = _without_nothing({**self.common, **attributes})
        return self.tracer.start_span(name, context, attributes=told, **options)


def conversation_of(turn: Turn) -> str:
    """The id of the conversation that a Turn belongs to, where there is one."""
    return BOUND.get().get("conversation_id", "") or get_state(turn).conversation_id


def _without_nothing(told: Mapping[str, Any]) -> "dict[str, AttributeValue]":
    return {name: value for name, value in told.items() if value is not None and value != ""}


def _put(span: "Span", name: str, value: Iterable[Any]) -> None:
    if listed := list(value):
        span.set_attribute(name, json.dumps(listed, ensure_ascii=False))


def _kind(error: BaseException) -> str:
    if isinstance(error, EngineError):
        return error.code or (str(error.status) if error.status else type(error).__name__)
    return type(error).__name__


def _mark(span: "Span", kind: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute(gen_ai.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR))
