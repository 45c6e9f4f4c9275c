"""Tests of the spans that ``trace`` exports for runs on the practice server."""

import json
from collections.abc import Iterator
from itertools import permutations
from typing import Any

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
from kedge.testing import TestServer, serve
from kedge.turns import assistant, tool_call
from middleware.scripted_engine import ScriptedEngine, add, run_stack

SECRET = "the harbour code is 4711"
HELLO = Turn([user("Hello")])


class Spans:
    """A tracer, and the spans that it has exported."""

    def __init__(self, provider: TracerProvider) -> None:
        self.exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("tests")

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        """The finished spans, in order."""
        return self.exporter.get_finished_spans()

    @property
    def by_name(self) -> dict[str, ReadableSpan]:
        """The finished spans by name; the newest of several with the same name."""
        return {span.name: span for span in self.all}

    def read(self, span: str | ReadableSpan) -> dict[str, Any]:
        """Return the attributes of a span."""
        return dict((self.by_name[span] if isinstance(span, str) else span).attributes or {})

    @property
    def text(self) -> str:
        """All finished spans as JSON text."""
        return "\n".join(span.to_json() for span in self.all)


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Yield a tracer that exports spans immediately."""
    provider = TracerProvider()
    yield Spans(provider)
    provider.shutdown()


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """Return whether one span is a direct child of the other."""
    return child.parent is not None and child.parent == parent.get_span_context()


CALL_ADD = Turn([user("Please call add with a=2 and b=3")])


@pytest.fixture
async def run_spans(engine: Engine, spans: Spans) -> tuple[ReadableSpan, ...]:
    """Return the spans of a run with two requests and a tool call: request, tool, request, run."""
    stack = with_middleware(engine, trace(spans.tracer, agent="harbour"), tools(add))
    await stack.run(CALL_ADD)
    return spans.all


async def test_a_run_with_tools_is_a_tree_of_spans(
    run_spans: tuple[ReadableSpan, ...], spans: Spans
) -> None:
    """The requests and tools of a run are children of its span."""
    names = [span.name for span in run_spans]
    assert names == ["chat practice", "execute_tool add", "chat practice", "invoke_agent harbour"]
    *children, run = run_spans
    assert run.parent is None
    assert all(is_child(child, run) for child in children)
    assert spans.read(run)["gen_ai.agent.name"] == "harbour"
    assert run.status.status_code is StatusCode.UNSET


async def test_the_span_of_a_request_follows_the_conventions(
    run_spans: tuple[ReadableSpan, ...], spans: Spans
) -> None:
    """It has the operation, the provider, the model, the response and the tokens."""
    first = run_spans[0]
    attributes = spans.read(first)
    assert first.kind is SpanKind.CLIENT
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "responses"
    assert attributes["gen_ai.request.model"] == "practice"
    assert attributes["gen_ai.response.id"].startswith("resp_")
    assert attributes["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert attributes["gen_ai.usage.input_tokens"] > 0


async def test_the_span_of_a_chained_request_names_its_anchor(
    run_spans: tuple[ReadableSpan, ...], spans: Spans
) -> None:
    """The second request continues the first one with the result of the tool."""
    first, _, second, _ = run_spans
    attributes = spans.read(second)
    assert attributes["kedge.anchor.id"] == spans.read(first)["gen_ai.response.id"]
    assert attributes["kedge.delta.blocks"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)


async def test_the_span_of_a_tool_begins_after_the_request_with_its_call(
    run_spans: tuple[ReadableSpan, ...], spans: Spans
) -> None:
    """It has the name and the call of the tool."""
    first, tool, _, _ = run_spans
    attributes = spans.read(tool)
    assert tool.kind is SpanKind.INTERNAL
    assert attributes["gen_ai.tool.name"] == "add"
    assert attributes["gen_ai.tool.call.id"].startswith("call_")
    assert tool.start_time is not None
    assert first.end_time is not None
    assert tool.start_time >= first.end_time


@pytest.mark.parametrize("streaming", [False, True])
async def test_spans_have_sizes_and_only_those_of_streams_a_first_chunk(
    engine: Engine, spans: Spans, *, streaming: bool
) -> None:
    """The sizes of a request are those of its event; a response that is not streamed has no first chunk."""
    _, events = await run_stack(engine, trace(spans.tracer), turn=HELLO, streaming=streaming)
    [sent] = [event for event in events if isinstance(event, RequestSent)]
    attributes = spans.read("chat practice")
    assert attributes["kedge.sent.bytes"] == sent.body_bytes
    assert attributes["kedge.full.bytes"] == sent.full_bytes
    assert ("gen_ai.response.time_to_first_chunk" in attributes) is streaming


SECRET_TURN = Turn([system("Be brief."), user(SECRET), *CALL_ADD.blocks])


async def test_no_content_is_exported_by_default(engine: Engine, spans: Spans) -> None:
    """Spans have no messages, arguments or results."""
    await run_stack(engine, trace(spans.tracer), tools(add), turn=SECRET_TURN)
    assert spans.all
    assert "harbour" not in spans.text
    assert "arguments" not in spans.text


async def test_content_is_exported_on_request(
    engine: Engine, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the environment variable, spans have messages, arguments and results."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    await run_stack(engine, trace(spans.tracer), tools(add), turn=SECRET_TURN)
    assert SECRET in spans.text
    assert "Be brief." in spans.text
    tool = spans.read("execute_tool add")
    assert tool["gen_ai.tool.call.result"] == "5"
    assert '"a"' in tool["gen_ai.tool.call.arguments"]
    output = spans.read("chat practice")["gen_ai.output.messages"]
    assert [message["finish_reason"] for message in json.loads(output)] == ["stop"]


async def test_the_argument_precedes_the_environment_variable_for_content(
    engine: Engine, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``content=False`` no content is exported."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    await run_stack(engine, trace(spans.tracer, content=False), tools(add), turn=SECRET_TURN)
    assert spans.all
    assert SECRET not in spans.text


async def test_spans_have_the_conversation_id(engine: Engine, spans: Spans) -> None:
    """The id is the one bound for logging, or that of the server's conversation object."""
    stack = with_middleware(engine, trace(spans.tracer))
    with bind_fields(conversation_id="harbour-talk"):
        await stack.run(HELLO)
    assert {spans.read(span)["gen_ai.conversation.id"] for span in spans.all} == {"harbour-talk"}
    spans.exporter.clear()
    await stack.run(HELLO, mode="conversation")
    assert spans.read("invoke_agent")["gen_ai.conversation.id"].startswith("conv_")


async def test_a_tool_that_fails_is_marked(engine: Engine, spans: Spans) -> None:
    """Its span has the error without its message; the turn's span has not, and is current while it runs."""

    def broken(text: str) -> str:
        """Fail."""
        with spans.tracer.start_as_current_span("inside"):
            raise RuntimeError("planted words")

    turn = Turn([user("Please call broken with text=x")])
    await run_stack(engine, trace(spans.tracer), tools(broken), turn=turn)
    tool, run = spans.by_name["execute_tool broken"], spans.by_name["invoke_agent"]
    assert tool.status.status_code is StatusCode.ERROR
    assert spans.read(tool)["error.type"] == "failed"
    assert run.status.status_code is StatusCode.UNSET
    assert "planted" not in "".join(each.to_json() for each in (tool, run))
    assert is_child(spans.by_name["inside"], run)


async def test_a_rejected_request_is_marked(spans: Spans) -> None:
    """The spans of request and turn have the server's error code and do not contain the API key."""
    with serve(token="right") as server:
        async with connect(f"responses:{server.base_url}#practice", api_key="wrong-key") as engine:
            with pytest.raises(EngineError):
                await run_stack(engine, trace(spans.tracer), turn=HELLO)
    assert [span.status.status_code for span in spans.all] == [StatusCode.ERROR] * 2
    assert {spans.read(span)["error.type"] for span in spans.all} == {"invalid_api_key"}
    assert "wrong-key" not in spans.text


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_incomplete_answer_has_its_usage(
    engine: Engine, spans: Spans, streaming: bool
) -> None:
    """The tokens of an answer that reached its limit are paid for, so its span has them and the reason."""
    stack = with_middleware(engine, trace(spans.tracer, content=True), guard(redact("kedge")))
    turn = Turn([user("Write 500 words.")])
    stream = stack.stream(turn, max_output_tokens=20, streaming=streaming)
    with pytest.raises(AnswerIncomplete) as caught:
        await stream.finish()
    attributes = spans.read("chat practice")
    assert caught.value.usage == stream.usage
    assert attributes["gen_ai.usage.output_tokens"] == stream.usage.output_tokens > 0
    assert attributes["gen_ai.response.id"] == caught.value.response_id
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["error.type"] == "max_output_tokens"
    [message] = json.loads(attributes["gen_ai.output.messages"])
    assert message["finish_reason"] == "length"
    assert "The [redacted] goes out" in message["parts"][0]["content"]


async def test_a_filtered_answer_has_its_finish_reason(spans: Spans) -> None:
    """An answer that a content filter stopped has the finish reason of the conventions."""
    error = AnswerIncomplete("stopped", code="content_filter")
    error.response_id = "resp_1"
    with pytest.raises(AnswerIncomplete):
        await run_stack(ScriptedEngine(error), trace(spans.tracer))
    assert spans.read(spans.all[0])["gen_ai.response.finish_reasons"] == ("content_filter",)


async def test_a_retried_request_is_marked(spans: Spans) -> None:
    """The span of an attempt that a middleware inside repeats has an error, and the tokens of its response."""
    error = ServerFailed("down", retryable=True)
    error.response_id, error.usage = "resp_1", Usage(input_tokens=7, output_tokens=3)
    engine = ScriptedEngine(error, [assistant("ok")])
    await run_stack(engine, trace(spans.tracer), retry(first=0))
    failed, sent, run = spans.all
    attributes = spans.read(failed)
    assert attributes["error.type"] == "retried"
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.id"] == "resp_1"
    assert {sent.status.status_code, run.status.status_code} == {StatusCode.UNSET}


async def test_a_healed_request_is_two_spans(
    engine: Engine, server: TestServer, spans: Spans
) -> None:
    """The rejected request's span has the reason, and the turn's span has an event for the healing."""
    stack = with_middleware(engine, trace(spans.tracer))
    turn = await stack.run(HELLO)
    spans.exporter.clear()
    server.forget()
    await stack.run(turn.append(user("And?")))
    rejected, sent, run = spans.all
    assert spans.read(rejected)["error.type"] == "healed:gone"
    assert sent.status.status_code is StatusCode.UNSET
    assert [event.name for event in run.events] == ["kedge.healed"]


async def test_closing_a_stream_early_ends_its_spans(engine: Engine, spans: Spans) -> None:
    """All spans are ended, and between two events the caller's span is the current one."""
    stack = with_middleware(engine, trace(spans.tracer))
    async with stack.stream(Turn([user("Write 50 words.")])) as stream:
        async for _ in stream:
            assert otel_trace.get_current_span() is otel_trace.INVALID_SPAN
            if stream.plans:
                break
    assert set(spans.by_name) == {"chat practice", "invoke_agent"}
    assert spans.read("invoke_agent")["error.type"] == "cancelled"


@pytest.mark.parametrize("order", list(permutations(("trace", "guard", "tools"))), ids="-".join)
async def test_exported_content_is_redacted_by_guards(order: tuple[str, ...], spans: Spans) -> None:
    """Messages, instructions, arguments and results are redacted in any order of the stack."""

    def look(text: str) -> str:
        """Return the text."""
        return f"{text}: {SECRET}"

    tracing = trace(spans.tracer, content=True)
    middleware = {"trace": tracing, "guard": guard(redact(SECRET)), "tools": tools(look)}
    call = tool_call("look", f'{{"text": "{SECRET}"}}', call_id="call_1")
    engine = ScriptedEngine([call], [assistant(f"I see: {SECRET}")])
    stack = [middleware[name] for name in order]
    await run_stack(engine, *stack, turn=Turn([system(SECRET), user(SECRET)]))
    assert "[redacted]" in spans.text
    assert SECRET not in spans.text
