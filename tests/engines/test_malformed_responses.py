"""Test servers that return invalid responses, and servers that repeat the API key."""

import json
import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from starlette.responses import Response

from engines.fake_server import (
    json_response,
    make_handler,
    serve_bytes,
    serve_handler,
    sse_response,
)
from for_each import for_each
from kedge.engines import ResponsesEngine
from kedge.errors import EngineError, RequestRefused, ServerFailed, StreamTooLarge
from kedge.events import RefusalDelta, TextDelta
from kedge.events.responses import ResponsesDecoder
from kedge.observe import TRACE, reset, snapshot
from kedge.planning import ConversationState, get_state, record_response, set_state
from kedge.providers import connect
from kedge.turns import ToolCallBlock, Turn, assistant, user

KEY = "sk-planted-in-this-test"
USER_TEXT = "planted words of a user"
TURN = Turn([user(USER_TEXT)])
ITEM = {"type": "message", "role": "assistant", "content": "Yes", "id": "m"}

INVALID_RESPONSES: dict[str, Callable[[], Response]] = {
    "a page": lambda: Response("<html>Sign in</html>", media_type="text/html"),
    "nothing": lambda: Response("", media_type="application/json"),
    "a list": lambda: json_response([]),
    "an empty object": lambda: json_response({}),
    "no error with status 200": lambda: json_response({"error": None}),
    "a detail with status 200": lambda: json_response({"detail": "out of credit"}),
}
FAILED = {"id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": KEY}}
KEY_LEAKS: dict[str, Callable[[], Response]] = {
    "refused": lambda: json_response({"error": {"message": KEY, "code": KEY, "param": KEY}}, 401),
    "limited": lambda: json_response({"error": {"message": f"slow down, {KEY}"}}, 429),
    "broken": lambda: Response(f"oops {KEY}", 500),
    "error with status 200": lambda: json_response({"error": {"message": KEY, "code": KEY}}),
    "failed": lambda: json_response({**FAILED, "output": []}),
    "error event": lambda: sse_response(
        {"type": "error", "code": KEY, "message": KEY, "param": None}
    ),
    "failed event": lambda: sse_response({"type": "response.failed", "response": FAILED}),
}


@for_each("name", INVALID_RESPONSES)
@for_each("streaming", [False, True])
async def test_invalid_response_raises(name: str, streaming: bool) -> None:
    """A body that is not a response raises an error despite status 200."""
    with serve_handler(make_handler(INVALID_RESPONSES[name])) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(ServerFailed, match="not a response") as exc_info:
                await engine.run(TURN, streaming=streaming)
    assert exc_info.value.turn is TURN
    assert exc_info.value.plan is not None
    assert exc_info.value.provider == "responses"


@for_each("api", ["responses", "chat", "anthropic"])
@for_each("streaming", [False, True])
async def test_an_error_with_status_200_is_raised_with_its_message(
    api: str, streaming: bool
) -> None:
    """OpenRouter and others report errors of the request with status 200, and the status as code."""
    body = {"error": {"code": 402, "message": "out of credit"}, "user_id": "u"}
    with serve_handler(make_handler(lambda: json_response(body))) as url:
        base: dict[str, Any] = {"base_url": url.removesuffix("/v1")} if api == "anthropic" else {}
        model = "anthropic:m" if api == "anthropic" else f"{api}:{url}#m"
        async with connect(model, api_key=KEY, max_retries=0, **base) as engine:
            with pytest.raises(ServerFailed, match="out of credit") as exc_info:
                await engine.run(TURN, streaming=streaming)
    assert (exc_info.value.code, exc_info.value.retryable) == ("402", False)
    assert exc_info.value.turn is TURN
    assert exc_info.value.plan is not None


@pytest.mark.parametrize("name", KEY_LEAKS)
@pytest.mark.parametrize("streaming", [False, True])
async def test_key_repeated_by_a_server_is_redacted(
    name: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither errors, tracebacks nor the log contain the key or the user's text."""
    caplog.set_level(TRACE, "kedge")
    with serve_handler(make_handler(KEY_LEAKS[name])) as url:
        async with connect(f"responses:{url}#m", api_key=KEY, max_retries=0) as engine:
            with pytest.raises(EngineError) as exc_info:
                await engine.run(TURN, streaming=streaming)
    error = exc_info.value
    texts = [str(error), repr(error), error.code, error.param, *traceback.format_exception(error)]
    records = [record for record in caplog.records if record.name.startswith("kedge")]
    assert any(record.levelno >= logging.WARNING for record in records)
    received = "\n".join([*texts, *(f"{record.getMessage()} {vars(record)}" for record in records)])
    assert KEY not in received
    assert USER_TEXT not in received


@pytest.mark.parametrize(
    "answer", [lambda: Response("oops", 500), lambda: Response("<html>"), lambda: json_response({})]
)
async def test_an_unavailable_conversation_object_is_an_error_with_the_turn(
    answer: Callable[[], Response],
) -> None:
    """If the object cannot be created or read, the error has the Turn and the plan."""
    known = set_state(TURN, ConversationState("conversation", "resp_1", "conv_1"))
    with serve_handler(make_handler(answer)) as url:
        async with connect(f"responses:{url}#m", mode="conversation", max_retries=0) as engine:
            for turn in (TURN, known):
                with pytest.raises(EngineError) as exc_info:
                    await engine.run(turn)
                assert exc_info.value.turn == turn
                assert exc_info.value.plan is not None


async def test_audit_ends_without_working_pagination() -> None:
    """A list that starts again on every page is read once, and a page of HTML gives no result."""
    item = {"id": "m", "type": "message", "role": "user", "content": "Another thing"}
    page = {"data": [item], "has_more": True, "last_id": "m", "output": []}
    async with (
        connect("responses:http://127.0.0.1:9/v1#m") as unreachable,
    ):
        assert isinstance(unreachable, ResponsesEngine)
        plan = unreachable.plan(TURN)
        turn = record_response(TURN, [assistant("Yes")], response_id="r", plan=plan, created_at=9e9)
    for answer, agrees in (
        (lambda: json_response(page), False),
        (lambda: Response("<html>"), None),
    ):
        with serve_handler(make_handler(answer)) as url:
            opened = connect(f"responses:{url}#m", scope=plan.scope, max_retries=0)
            assert isinstance(opened, ResponsesEngine)
            async with opened as engine:
                assert (await engine.verify(turn)).agrees is agrees


@for_each(
    ("code", "retryable"),
    [
        ("server_error", True),
        ("rate_limit_exceeded", True),
        ("vector_store_timeout", True),
        ("failed_to_download_image", True),
        ("", True),
        ("invalid_prompt", False),
        ("image_content_policy_violation", False),
        ("unsupported_image_media_type", False),
        ("empty_image_file", False),
        ("context_length_exceeded", False),
        ("insufficient_quota", False),
        ("429", True),
        ("503", True),
        ("400", False),
    ],
)
@for_each("event", ["response.failed", "error"])
async def test_a_failure_is_retryable_unless_its_code_is_permanent(
    code: str, retryable: bool, event: str
) -> None:
    """Failures caused by the request are permanent; failures of the server may be temporary."""
    error = {"code": code, "message": "no"}
    received = {**error} if event == "error" else {"response": {**FAILED, "error": error}}
    with serve_handler(make_handler(lambda: sse_response({"type": event, **received}))) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(ServerFailed) as exc_info:
                await engine.run(TURN)
    assert exc_info.value.retryable is retryable
    assert exc_info.value.turn is TURN


TERMINAL_EVENTS: dict[str, dict[str, Any]] = {
    "completed": {"type": "response.completed", "response": {"id": "resp_1", "output": [ITEM]}},
    "failed": {"type": "response.failed", "response": FAILED},
    "error": {"type": "error", "code": "server_error", "message": "no", "param": None},
}


@pytest.mark.parametrize("ending", TERMINAL_EVENTS)
async def test_stream_ends_with_its_last_event(ending: str) -> None:
    """The answer ends with its last event, although the connection stays open."""
    body = f"data: {json.dumps(TERMINAL_EVENTS[ending])}\n\n".encode()
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    with serve_bytes(head + b"\r\n\r\n" + chunk, keep_open=True) as url, anyio.fail_after(300):
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            if ending == "completed":
                assert "Yes" in str((await engine.run(TURN, streaming=True)).blocks[-1])
            else:
                with pytest.raises(ServerFailed):
                    await engine.run(TURN, streaming=True)


@pytest.mark.parametrize("media_type", [None, "text/plain; charset=utf-8"])
@pytest.mark.parametrize("form", ["events", "one body"])
async def test_a_stream_without_its_content_type_is_read(media_type: str | None, form: str) -> None:
    """Some servers do not label their streams, or answer a request for a stream with one body."""
    ending = TERMINAL_EVENTS["completed"]
    text = json.dumps(ending["response"])
    if form == "events":
        text = f"\n\n: comment\n\ndata: {json.dumps(ending)}\n\n"
    response = make_handler(lambda: Response(text, media_type=media_type))
    with serve_handler(response) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            turn = await engine.run(TURN, streaming=True)
    assert turn.blocks[-1].text == "Yes"  # pyright: ignore[reportAttributeAccessIssue]


@for_each("media_type", ["application/json", "application/octet-stream"])
@for_each("start", [b"", b"\xef\xbb\xbf", b"\n: processing\n\n"])
@for_each("streaming", [True, False])
async def test_a_stream_with_the_label_of_another_type_is_read(
    media_type: str, start: bytes, streaming: bool
) -> None:
    """Some gateways label a stream as JSON or as binary data."""
    text = start + f"data: {json.dumps(TERMINAL_EVENTS['completed'])}\n\n".encode()
    with serve_handler(make_handler(lambda: Response(text, media_type=media_type))) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            turn = await engine.run(TURN, streaming=streaming)
    assert turn.blocks[-1] == assistant("Yes")


@pytest.mark.parametrize("form", ["one body", "terminal event", "item done"])
async def test_text_that_was_not_streamed_is_shown(form: str) -> None:
    """A caller who shows the deltas of a stream shows an answer that arrives at once, too."""
    refused = {"type": "refusal", "refusal": "No"}
    items = [ITEM, {**ITEM, "id": "n", "content": [refused]}]
    response = {"id": "resp_1", "status": "completed", "output": items}
    ending = {"type": "response.completed", "response": response}
    done = [
        {"type": "response.output_item.done", "output_index": at, "item": item}
        for at, item in enumerate(items)
    ]
    answers = {
        "one body": lambda: json_response(response),
        "terminal event": lambda: sse_response(ending),
        "item done": lambda: sse_response(*done, ending),
    }
    with serve_handler(make_handler(answers[form])) as url:
        async with (
            connect(f"responses:{url}#m", max_retries=0) as engine,
            engine.stream(TURN) as stream,
        ):
            events = [event async for event in stream]
    deltas = [event for event in events if isinstance(event, TextDelta | RefusalDelta)]
    shown = [(type(event), event.delta, event.output_index) for event in deltas]
    assert shown == [(TextDelta, "Yes", 0), (RefusalDelta, "No", 1)]


async def test_too_large_stream_error_has_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error has the provider, the Turn and the plan, like other engine errors."""
    decoder_type = staticmethod(partial(ResponsesDecoder, max_line=100))
    monkeypatch.setattr(ResponsesEngine, "decoder_type", decoder_type)
    ending = TERMINAL_EVENTS["completed"] | {"padding": "x" * 200}
    with serve_handler(make_handler(lambda: sse_response(ending))) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(StreamTooLarge) as exc_info:
                await engine.run(TURN)
    error = exc_info.value
    assert error.turn is TURN
    assert error.plan is not None
    assert (error.provider, error.limit) == ("responses", 100)


async def test_unknown_error_codes_share_one_metric_label() -> None:
    """Known codes are counted by name, and all others under one label."""
    reset()
    for code in ("invalid_value", "resp_0123", "my_code"):
        refusal = {"error": {"message": "no", "code": code}}
        with serve_handler(
            make_handler(lambda refusal=refusal: json_response(refusal, 400))
        ) as url:
            async with connect(f"responses:{url}#m", max_retries=0) as engine:
                with pytest.raises(RequestRefused):
                    await engine.run(TURN)
    counted = snapshot()["responses_rejected_total"]
    assert counted == {(("code", "invalid_value"),): (1, 1.0), (("code", "other"),): (2, 2.0)}


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
    {"type": "function", "name": "now", "parameters": {"type": "object"}},
]


CHAT_CALL = {"id": "call_1", "type": "function", "function": {"arguments": '{"a": 1}'}}
UNNAMED_CALLS: dict[str, dict[str, Any]] = {
    "responses": {
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "arguments": '{"a": 1}'}
        ],
    },
    "chat": {
        "id": "c_1",
        "choices": [
            {"finish_reason": "tool_calls", "message": {"tool_calls": [CHAT_CALL], "content": None}}
        ],
    },
}


@pytest.mark.parametrize("kind", UNNAMED_CALLS)
async def test_a_call_without_a_name_is_counted_and_is_no_anchor(kind: str) -> None:
    """The Turn has the inferred name; the server stored none, so nothing is chained on it."""
    reset()
    with serve_handler(make_handler(lambda: json_response(UNNAMED_CALLS[kind]))) as url:
        async with connect(f"{kind}:{url}#m", max_retries=0) as engine:
            turn = await engine.run(TURN, tools=TOOLS)
    (call,) = (block for block in turn.blocks if isinstance(block, ToolCallBlock))
    assert (call.name, call.call_id) == ("add", "call_1")
    assert kind == "chat" or get_state(turn).anchors == ()
    assert snapshot()["tool_call_names_inferred_total"] == {(): (1, 1.0)}
