"""Test servers with invalid or contradicting responses, faults of the local server, and repeated API keys."""

import json
import logging
import re
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.responses import Response

from engines.conftest import open_engine
from engines.fake_server import (
    catch_error,
    chunked_head,
    complete_response,
    connect_to,
    json_response,
    serve_bytes,
    sse_response,
    stream_response,
)
from engines.runs import check_law, collect_events, last_text, list_reasons, send_lines
from for_each import for_each
from kedge.engines import ResponsesEngine
from kedge.errors import (
    EngineError,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    StreamTooLarge,
)
from kedge.events import Event, RefusalDelta, TextDelta
from kedge.events.run import ServerForgot
from kedge.observe import TRACE, reset, snapshot
from kedge.planning import ConversationState, record_response, set_state
from kedge.providers import connect
from kedge.testing import TestServer
from kedge.turns import Turn, assistant, user
from kedge.wire.responses import ResponsesDecoder

KEY = "sk-planted-in-this-test"
USER_TEXT = "planted words of a user"
TURN = Turn([user(USER_TEXT)])
ITEM = {"type": "message", "role": "assistant", "content": "Yes", "id": "m"}

INVALID_RESPONSES = {
    "a page": Response("<html>Sign in</html>", media_type="text/html"),
    "nothing": Response("", media_type="application/json"),
    "a list": json_response([]),
    "an empty object": json_response({}),
    "no error with status 200": json_response({"error": None}),
    "a detail with status 200": json_response({"detail": "out of credit"}),
}
FAILED = {"id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": KEY}}
KEY_LEAKS = {
    "refused": json_response({"error": {"message": KEY, "code": KEY, "param": KEY}}, 401),
    "limited": json_response({"error": {"message": f"slow down, {KEY}"}}, 429),
    "broken": Response(f"oops {KEY}", 500),
    "error with status 200": json_response({"error": {"message": KEY, "code": KEY}}),
    "failed": json_response({**FAILED, "output": []}),
    "error event": sse_response({"type": "error", "code": KEY, "message": KEY, "param": None}),
    "failed event": sse_response({"type": "response.failed", "response": FAILED}),
}


@for_each("api", ["responses", "chat"])
@for_each("name", INVALID_RESPONSES)
@for_each("streaming", [False, True])
async def test_invalid_response_raises(api: str, name: str, streaming: bool) -> None:
    """A body that is not a response raises an error despite status 200."""
    options = {"streaming": streaming}
    answer = INVALID_RESPONSES[name]
    error = await catch_error(ServerFailed, answer, "not a response", api=api, options=options)
    assert error.provider == api


@for_each("api", ["responses", "chat", "anthropic"])
@for_each("streaming", [False, True])
async def test_an_error_with_status_200_is_raised_with_its_message(
    api: str, streaming: bool
) -> None:
    """OpenRouter and others report errors of the request with status 200, and the status as code."""
    body = {"error": {"code": 402, "message": "out of credit"}, "user_id": "u"}
    options = {"streaming": streaming}
    error = await catch_error(
        ServerFailed, json_response(body), "out of credit", api=api, options=options
    )
    assert (error.code, error.retryable) == ("402", False)


@pytest.mark.parametrize("name", KEY_LEAKS)
@pytest.mark.parametrize("streaming", [False, True])
async def test_key_repeated_by_a_server_is_redacted(
    name: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither errors, tracebacks nor the log contain the key or the user's text."""
    caplog.set_level(TRACE, "kedge")
    options = {"streaming": streaming}
    error = await catch_error(EngineError, KEY_LEAKS[name], turn=TURN, options=options, api_key=KEY)
    texts = [str(error), repr(error), error.code, error.param, *traceback.format_exception(error)]
    records = [record for record in caplog.records if record.name.startswith("kedge")]
    assert any(record.levelno >= logging.WARNING for record in records)
    received = "\n".join([*texts, *(f"{record.getMessage()} {vars(record)}" for record in records)])
    assert KEY not in received
    assert USER_TEXT not in received


@for_each("answer", [Response("oops", 500), Response("<html>"), json_response({})])
async def test_an_unavailable_conversation_object_is_an_error_with_the_turn(
    answer: Response,
) -> None:
    """If the object cannot be created or read, the error has the Turn and the plan."""
    known = set_state(TURN, ConversationState("conversation", "resp_1", "conv_1"))
    for turn in (TURN, known):
        await catch_error(EngineError, answer, turn=turn, mode="conversation")


async def test_audit_ends_without_working_pagination() -> None:
    """A list that starts again on every page is read once, and a page of HTML gives no result."""
    item = {"id": "m", "type": "message", "role": "user", "content": "Another thing"}
    page = {"data": [item], "has_more": True, "last_id": "m", "output": []}
    for answer, agrees in ((json_response(page), False), (Response("<html>"), None)):
        async with connect_to(answer) as engine:
            plan, said = engine.plan(TURN), [assistant("Yes")]
            turn = record_response(TURN, said, response_id="r", plan=plan, created_at=9e9)
            assert (await engine.verify(turn)).agrees is agrees


TEMPORARY = ["server_error", "rate_limit_exceeded", "vector_store_timeout", "", "429", "503"]
TEMPORARY += ["failed_to_download_image"]
PERMANENT = ["invalid_prompt", "image_content_policy_violation", "unsupported_image_media_type"]
PERMANENT += ["empty_image_file", "context_length_exceeded", "insufficient_quota", "400"]


@for_each("code", [*TEMPORARY, *PERMANENT])
@for_each("event", ["response.failed", "error"])
async def test_a_failure_is_retryable_unless_its_code_is_permanent(code: str, event: str) -> None:
    """Failures caused by the request are permanent; failures of the server may be temporary."""
    error = {"code": code, "message": "no"}
    received = {**error} if event == "error" else {"response": {**FAILED, "error": error}}
    answer = sse_response({"type": event, **received})
    assert (await catch_error(ServerFailed, answer)).retryable is (code in TEMPORARY)


TERMINAL_EVENTS: dict[str, dict[str, Any]] = {
    "completed": {"type": "response.completed", "response": {"id": "resp_1", "output": [ITEM]}},
    "failed": {"type": "response.failed", "response": FAILED},
    "error": {"type": "error", "code": "server_error", "message": "no", "param": None},
}


@pytest.mark.parametrize("ending", TERMINAL_EVENTS)
async def test_stream_ends_with_its_last_event(ending: str) -> None:
    """The answer ends with its last event, although the connection stays open."""
    body = f"data: {json.dumps(TERMINAL_EVENTS[ending])}\n\n".encode()
    with serve_bytes(chunked_head(body), keep_open=True) as url, anyio.fail_after(300):
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            if ending == "completed":
                assert "Yes" in str((await engine.run(TURN, streaming=True)).blocks[-1])
            else:
                with pytest.raises(ServerFailed):
                    await engine.run(TURN, streaming=True)


@for_each(
    "media_type",
    [None, "text/plain; charset=utf-8", "application/json", "application/octet-stream"],
)
@for_each("start", [b"", b"\xef\xbb\xbf", b"\n: processing\n\n", b"id: 1\n", b"retry: 3000\n\n"])
@for_each("streaming", [True, False])
async def test_a_stream_without_its_content_type_is_read(
    media_type: str | None, start: bytes, streaming: bool
) -> None:
    """Some servers and gateways do not label a stream, or as text, JSON or binary data."""
    text = start + f"data: {json.dumps(TERMINAL_EVENTS['completed'])}\n\n".encode()
    async with connect_to(Response(text, media_type=media_type)) as engine:
        turn = await engine.run(TURN, streaming=streaming)
    assert turn.blocks[-1] == assistant("Yes")


@for_each("media_type", [None, "text/plain", "application/json", "text/event-stream"])
async def test_an_object_with_a_byte_order_mark_is_read(media_type: str | None) -> None:
    """A server may ignore ``stream``, label its answer as it likes, and begin it with a byte order mark."""
    text = b"\xef\xbb\xbf" + json.dumps(complete_response("resp_1", ITEM)).encode()
    async with connect_to(Response(text, media_type=media_type)) as engine:
        turn = await engine.run(TURN, streaming=True)
    assert turn.blocks[-1] == assistant("Yes")


@pytest.mark.parametrize("form", ["one body", "terminal event", "item done"])
async def test_text_that_was_not_streamed_is_shown(form: str) -> None:
    """A caller who shows the deltas of a stream shows an answer that arrives at once, too."""
    refused = {"type": "refusal", "refusal": "No"}
    items = [ITEM, {**ITEM, "id": "n", "content": [refused]}]
    response = complete_response("resp_1", *items)
    ending = {"type": "response.completed", "response": response}
    answers = {
        "one body": json_response(response),
        "terminal event": sse_response(ending),
        "item done": stream_response(response),
    }
    async with connect_to(answers[form]) as engine, engine.stream(TURN) as stream:
        events = [event async for event in stream]
    deltas = [event for event in events if isinstance(event, TextDelta | RefusalDelta)]
    shown = [(type(event), event.delta, event.output_index) for event in deltas]
    assert shown == [(TextDelta, "Yes", 0), (RefusalDelta, "No", 1)]


async def test_too_large_stream_error_has_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the provider, the Turn and the plan, like other engine errors."""
    decoder_type = staticmethod(partial(ResponsesDecoder, max_line=100))
    monkeypatch.setattr(ResponsesEngine, "decoder_type", decoder_type)
    ending = TERMINAL_EVENTS["completed"] | {"padding": "x" * 200}
    error = await catch_error(StreamTooLarge, sse_response(ending))
    assert (error.provider, error.limit) == ("responses", 100)


async def test_unknown_error_codes_share_one_metric_label() -> None:
    """Known codes are counted by name, and all others under one label."""
    reset()
    for code in ("invalid_value", "resp_0123", "my_code"):
        refusal = {"error": {"message": "no", "code": code}}
        options = {"keep_reasoning": False}  # otherwise each first request would be repeated
        await catch_error(RequestRefused, json_response(refusal, 400), options=options)
    counted = snapshot()["responses_rejected_total"]
    assert counted == {(("code", "invalid_value"),): (1, 1.0), (("code", "other"),): (2, 2.0)}


LONG = "The river runs from the mountains to the sea, past towns and mills and meadows. " * 80

FAULTS: dict[str, type[EngineError] | str | None] = {
    **dict.fromkeys(("cut_after_events=0", "cut_after_events=1", "cut_after_events=3"), StreamCut),
    **dict.fromkeys(("cut_in_event=2", "cut_in_event=5"), StreamCut),
    **dict.fromkeys(("fail_after_events=3", "status=500", "status=503"), ServerFailed),
    "status=429,retry_after=0": RateLimited,
    "forget_all": "gone",
    "forget_silently": "forgot, shown",
    "forget_silently,echo=no": "forgot",
    "remember=0": "forgot, shown",
    # After honest counts, one without the context cannot be distinguished from a loss.
    "report_usage=constant": "forgot, shown",
    "report_usage=new": "forgot, shown",
    "refuse_previous_response_id=llama.cpp": "unsupported",
    "refuse_previous_response_id=zdr": "unsupported",
    **dict.fromkeys(
        [
            *("slow_first_byte=0.05", "anonymous", "report_usage=none", "report_usage=uncached"),
            *("report_usage=trimmed", "report_unstored", "hide_stored", "change_completed=text"),
            *("change_completed=arguments", "change_completed=missing", "omit_output_index"),
            *("stream_content_type=none", "stream_content_type=plain", "repeat_after_finish"),
            *("lone_surrogate", "reuse_response_id", "duplicate_events", "omit_call_id"),
            *("reorder_events,only=response.output_text.delta", "empty_call_id"),
            *("omit_response_id", "refuse_encrypted_reasoning", "refuse_empty_input"),
            *("omit_call_name", "refuse_output_format"),
        ]
    ),
}


STREAMED = re.compile(
    r"\w+_events?=|change_completed|omit_output_index|stream_content_type|repeat_"
)
"""Faults that affect only streams."""
CASES = [
    (fault, streaming)
    for fault in FAULTS
    for streaming in (True, False)
    if streaming or not STREAMED.match(fault)
]


@pytest.mark.parametrize(("fault", "streaming"), CASES)
async def test_fault_ends_in_a_correct_turn_or_a_typed_error(
    server: TestServer, fault: str, streaming: bool
) -> None:
    """Nothing of the Turn is lost, and the conversation continues afterwards."""
    expected = FAULTS[fault]
    async with open_engine(server) as engine:
        turn = await send_lines(engine, f"Remember this: {LONG}", "Thanks")
        server.faults.set(fault, times=1)
        requested = turn.append(user("What did I say first?"))
        if isinstance(expected, type):
            with pytest.raises(expected) as exc_info:
                await collect_events(engine, requested, streaming=streaming)
            assert exc_info.value.turn is not None
            assert exc_info.value.turn.blocks[: len(requested)] == requested.blocks
            assert exc_info.value.retryable
            requested = exc_info.value.turn
            finished = await engine.run(requested)
        else:
            finished, events = await collect_events(engine, requested, streaming=streaming)
            _check_events(events, expected, streaming=streaming)
        server.faults.clear()
        if expected != "forgot, shown" or not streaming:
            assert LONG[:40] in last_text(finished)
            check_law(server, finished)
        later = await engine.run(finished.append(user("How many messages are there?")))
        check_law(server, later)


def _check_events(events: list[Event], expected: object, *, streaming: bool) -> None:
    healed = list_reasons(events)
    forgot = [event for event in events if isinstance(event, ServerForgot)]
    if expected == "forgot, shown":
        assert (healed, len(forgot)) == (([], 1) if streaming else (["forgot"], 0))
    else:
        assert healed == ([expected] if expected else [])
        assert forgot == []


@pytest.mark.parametrize(
    ("fault", "mode", "blocks", "reason"),
    [
        ("refuse_encrypted_reasoning", "stateless", (user("Two"),), "reasoning"),
        ("refuse_empty_input", "chained", (), "empty_input"),
    ],
)
async def test_rejected_content_is_replaced(
    server: TestServer, fault: str, mode: Any, blocks: tuple[Any, ...], reason: str
) -> None:
    """Rejected encrypted reasoning is left out, and a rejected empty delta becomes a full send."""
    async with open_engine(server, mode=mode) as engine:
        turn = await send_lines(engine, "Think about one.")
        server.faults.set(fault)
        turn, events = await collect_events(engine, turn.append(*blocks))
    assert list_reasons(events) == [reason]
    check_law(server, turn)


def test_every_documented_fault_is_tested() -> None:
    """Every fault that the server documents is tested here."""
    page = (Path(__file__).parents[2] / "docs" / "practice-model.md").read_text()
    rows = page.split("\n## Faults\n")[1]
    documented = set(re.findall(r"^\| `(\w+)", rows, re.MULTILINE)) - {"not_found"}
    assert {fault.partition("=")[0].partition(",")[0] for fault in FAULTS} == documented
