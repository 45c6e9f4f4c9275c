"""Tests of the spans that ``trace`` exports for runs on the practice server."""

import json
from collections.abc import AsyncIterator, Iterator
from itertools import permutations

import pytest
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kedge import AnswerIncomplete, EngineError, Turn, connect, system, user, with_middleware
from kedge.engines import Engine
from kedge.errors import ServerFailed
from kedge.events import Usage
from kedge.events.run import RequestSent
from kedge.middleware import guard, redact, retry, tools, trace
from kedge.observe import bind_fields
from kedge.testing import serve
from kedge.turns import assistant, tool_call
from middleware.scripted_engine import ScriptedEngine

SECRET = "the harbour code is 4711"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """Return the exporter that collects the spans of a test."""
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Iterator[otel_trace.Tracer]:
    """Yield a tracer that exports spans immediately."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider.get_tracer("tests")
    provider.shutdown()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


@pytest.fixture
async def practice() -> AsyncIterator[Engine]:
    """Yield an engine for the practice model."""
    with serve() as server:
        async with connect(f"responses:{server.base_url}#practice") as engine:
            yield engine


def spans_by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the finished spans by name; the newest of several with the same name."""
    return {span.name: span for span in spans.get_finished_spans()}


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """Return whether one span is a direct child of the other."""
    return child.parent is not None and child.parent == parent.get_span_context()


def spans_text(spans: InMemorySpanExporter) -> str:
    """Return all finished spans as JSON text."""
    return "\n".join(span.to_json() for span in spans.get_finished_spans())


async def test_a_run_with_tools_is_a_tree_of_spans(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """A turn with two requests and a tool call has spans that follow the semantic conventions."""
    engine = with_middleware(practice, trace(tracer, agent="harbour"), tools(add))
    await engine.run(Turn([user("Please call add with a=2 and b=3")]))
    names = [span.name for span in spans.get_finished_spans()]
    assert names == ["chat practice", "execute_tool add", "chat practice", "invoke_agent harbour"]
    first, tool, second, run = spans.get_finished_spans()
    assert run.parent is None
    assert (run.attributes or {})["gen_ai.agent.name"] == "harbour"
    for child in (first, tool, second):
        assert is_child(child, run)
    assert first.kind is SpanKind.CLIENT
    assert tool.kind is SpanKind.INTERNAL
    assert first.attributes is not None
    assert first.attributes["gen_ai.operation.name"] == "chat"
    assert first.attributes["gen_ai.provider.name"] == "responses"
    assert first.attributes["gen_ai.request.model"] == "practice"
    assert str(first.attributes["gen_ai.response.id"]).startswith("resp_")
    assert first.attributes["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert int(str(first.attributes["gen_ai.usage.input_tokens"])) > 0
    assert second.attributes is not None
    assert second.attributes["kedge.anchor.id"] == first.attributes["gen_ai.response.id"]
    assert second.attributes["kedge.delta.blocks"] == 1
    assert second.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert tool.attributes is not None
    assert tool.attributes["gen_ai.tool.name"] == "add"
    assert str(tool.attributes["gen_ai.tool.call.id"]).startswith("call_")
    assert tool.start_time is not None
    assert first.end_time is not None
    assert tool.start_time >= first.end_time
    assert run.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("streaming", [False, True])
async def test_spans_have_sizes_and_only_those_of_streams_a_first_chunk(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter, *, streaming: bool
) -> None:
    """The sizes of a request are those of its event; a response that is not streamed has no first chunk."""
    engine = with_middleware(practice, trace(tracer))
    async with engine.stream(Turn([user("Hello")]), streaming=streaming) as stream:
        [sent] = [event async for event in stream if isinstance(event, RequestSent)]
    attributes = spans_by_name(spans)["chat practice"].attributes or {}
    assert attributes["kedge.sent.bytes"] == sent.body_bytes
    assert attributes["kedge.full.bytes"] == sent.full_bytes
    assert ("gen_ai.response.time_to_first_chunk" in attributes) is streaming


async def test_content_is_exported_only_on_request(
    practice: Engine,
    tracer: otel_trace.Tracer,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default no messages, arguments or results are exported; with the setting, all of them are."""
    turn = Turn([system("Be brief."), user(SECRET), user("Please call add with a=2 and b=3")])
    await with_middleware(practice, trace(tracer), tools(add)).run(turn)
    assert "harbour" not in spans_text(spans)
    assert "arguments" not in spans_text(spans)
    spans.clear()
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    await with_middleware(practice, trace(tracer), tools(add)).run(turn)
    received = spans_text(spans)
    assert SECRET in received
    attributes = spans_by_name(spans)["execute_tool add"].attributes or {}
    assert attributes["gen_ai.tool.call.result"] == "5"
    assert '"a"' in str(attributes["gen_ai.tool.call.arguments"])
    assert "Be brief." in received
    written = str(
        (spans_by_name(spans)["chat practice"].attributes or {})["gen_ai.output.messages"]
    )
    assert [message["finish_reason"] for message in json.loads(written)] == ["stop"]
    spans.clear()
    await with_middleware(practice, trace(tracer, content=False), tools(add)).run(turn)
    assert SECRET not in spans_text(spans)


async def test_spans_have_the_conversation_id(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The id is the one bound for logging, or that of the server's conversation object."""
    engine = with_middleware(practice, trace(tracer))
    with bind_fields(conversation_id="harbour-talk"):
        await engine.run(Turn([user("Hello")]))
    for span in spans.get_finished_spans():
        assert (span.attributes or {})["gen_ai.conversation.id"] == "harbour-talk"
    spans.clear()
    await engine.run(Turn([user("Hello")]), mode="conversation")
    run = spans_by_name(spans)["invoke_agent"]
    assert str((run.attributes or {})["gen_ai.conversation.id"]).startswith("conv_")


async def test_a_tool_that_fails_is_marked(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The tool's span has the error status without the exception message; the turn's span has not."""
    engine = with_middleware(practice, trace(tracer), tools(broken))
    await engine.run(Turn([user("Please call broken with text=harbour")]))
    tool, run = spans_by_name(spans)["execute_tool broken"], spans_by_name(spans)["invoke_agent"]
    assert tool.status.status_code is StatusCode.ERROR
    assert (tool.attributes or {})["error.type"] == "failed"
    assert run.status.status_code is StatusCode.UNSET
    assert "harbour" not in spans_text(spans)


async def test_a_rejected_request_is_marked(
    tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The spans of request and turn have the server's error code and do not contain the API key."""
    with serve(token="right") as server:
        engine = connect(f"responses:{server.base_url}#practice", api_key="wrong-key")
        with pytest.raises(EngineError):
            await with_middleware(engine, trace(tracer)).run(Turn([user("Hello")]))
        await engine.aclose()
    for span in spans.get_finished_spans():
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "invalid_api_key"
    assert len(spans.get_finished_spans()) == 2
    assert "wrong-key" not in spans_text(spans)


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_incomplete_answer_has_its_usage(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter, streaming: bool
) -> None:
    """The tokens of an answer that reached its limit are paid for, so its span has them and the reason."""
    engine = with_middleware(practice, trace(tracer, content=True), guard(redact("kedge")))
    turn = Turn([user("Write 500 words.")])
    stream = engine.stream(turn, max_output_tokens=20, streaming=streaming)
    with pytest.raises(AnswerIncomplete) as caught:
        await stream.finish()
    attributes = spans_by_name(spans)["chat practice"].attributes or {}
    assert caught.value.usage == stream.usage
    assert attributes["gen_ai.usage.output_tokens"] == stream.usage.output_tokens > 0
    assert attributes["gen_ai.response.id"] == caught.value.response_id
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["error.type"] == "max_output_tokens"
    [message] = json.loads(str(attributes["gen_ai.output.messages"]))
    assert message["finish_reason"] == "length"
    assert "The [redacted] goes out" in message["parts"][0]["content"]


async def test_a_filtered_answer_has_its_finish_reason(
    tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """An answer that a content filter stopped has the finish reason of the conventions."""
    error = AnswerIncomplete("stopped", code="content_filter")
    error.response_id = "resp_1"
    engine = with_middleware(ScriptedEngine(error), trace(tracer))
    with pytest.raises(AnswerIncomplete):
        await engine.run(Turn([user("Hello")]))
    attributes = spans.get_finished_spans()[0].attributes or {}
    assert attributes["gen_ai.response.finish_reasons"] == ("content_filter",)


async def test_a_retried_request_is_marked(
    tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The span of a failed attempt has an error, also if a middleware inside retries it."""
    with serve() as server:
        server.faults.set("status=500", times=1)
        practice = connect(f"responses:{server.base_url}#practice", max_retries=0)
        engine = with_middleware(practice, trace(tracer), retry(first=0))
        await engine.run(Turn([user("Hello")]))
        await engine.aclose()
    failed, sent, run = spans.get_finished_spans()
    assert (failed.attributes or {})["error.type"] == "retried"
    assert {sent.status.status_code, run.status.status_code} == {StatusCode.UNSET}


async def test_tokens_of_a_retried_request_are_recorded(
    tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The span of an attempt that a middleware inside repeats has the tokens of its response."""
    error = ServerFailed("down", retryable=True)
    error.response_id, error.usage = "resp_1", Usage(input_tokens=7, output_tokens=3)
    engine = ScriptedEngine(error, [assistant("ok")])
    await with_middleware(engine, trace(tracer), retry(first=0)).run(Turn([user("Hello")]))
    attributes = spans.get_finished_spans()[0].attributes or {}
    assert attributes["error.type"] == "retried"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (
        7,
        3,
    )
    assert attributes["gen_ai.response.id"] == "resp_1"


async def test_a_healed_request_is_two_spans(
    tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The rejected request's span has the reason, and the turn's span has an event for the healing."""
    with serve() as server:
        engine = with_middleware(connect(f"responses:{server.base_url}#practice"), trace(tracer))
        turn = await engine.run(Turn([user("Hello")]))
        spans.clear()
        server.forget()
        await engine.run(turn.append(user("And?")))
        await engine.aclose()
    rejected, sent, run = spans.get_finished_spans()
    assert (rejected.attributes or {})["error.type"] == "healed:gone"
    assert sent.status.status_code is StatusCode.UNSET
    assert [event.name for event in run.events] == ["kedge.healed"]


async def test_closing_a_stream_early_ends_its_spans(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """All spans are ended, and between two events the caller's span is the current one."""
    engine = with_middleware(practice, trace(tracer))
    async with engine.stream(Turn([user("Write 50 words.")])) as stream:
        async for _ in stream:
            assert otel_trace.get_current_span() is otel_trace.INVALID_SPAN
            if stream.plans:
                break
    assert set(spans_by_name(spans)) == {"chat practice", "invoke_agent"}
    assert (spans_by_name(spans)["invoke_agent"].attributes or {})["error.type"] == "cancelled"


async def test_spans_of_tools_are_children_of_the_turn(
    practice: Engine, tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """The turn's span is the current one while a tool runs."""

    def look(text: str) -> str:
        """Look."""
        with tracer.start_as_current_span("inside"):
            return text

    engine = with_middleware(practice, trace(tracer), tools(look))
    await engine.run(Turn([user("Please call look with text=x")]))
    inner, run = spans_by_name(spans)["inside"], spans_by_name(spans)["invoke_agent"]
    assert is_child(inner, run)


async def test_without_an_sdk_nothing_happens(practice: Engine) -> None:
    """Without an SDK the API creates no spans, and the answer is unchanged."""
    turn = await with_middleware(practice, trace()).run(Turn([user("What is 2+3?")]))
    assert "5" in str(turn.blocks[-1])


@pytest.mark.parametrize("order", list(permutations(("trace", "guard", "tools"))), ids="-".join)
async def test_exported_content_is_redacted_by_guards(
    order: tuple[str, ...], tracer: otel_trace.Tracer, spans: InMemorySpanExporter
) -> None:
    """Messages, instructions, arguments and results are redacted in any order of the stack."""

    def look(text: str) -> str:
        """Return the text."""
        return f"{text}: {SECRET}"

    middleware = {
        "trace": trace(tracer, content=True),
        "guard": guard(redact(SECRET)),
        "tools": tools(look),
    }
    call = tool_call("look", f'{{"text": "{SECRET}"}}', call_id="call_1")
    engine = ScriptedEngine([call], [assistant(f"I see: {SECRET}")])
    stack = with_middleware(engine, *(middleware[name] for name in order))
    await stack.run(Turn([system(SECRET), user(SECRET)]))
    assert "[redacted]" in spans_text(spans)
    assert SECRET not in spans_text(spans)
