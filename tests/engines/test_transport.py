"""Test the HTTP transport: retries of the client, timeouts, and the errors for failures."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import (
    TURN,
    RecordingServer,
    catch_error,
    connect_to,
    json_response,
    serve_bytes,
    serve_handler,
    sse_response,
)
from for_each import for_each
from kedge.engines.http_errors import MAX_MESSAGE_LENGTH
from kedge.errors import (
    EngineError,
    NotAuthorized,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
)
from kedge.planning import get_state
from kedge.providers import connect
from kedge.testing import TestServer

SECRET = "secret-77"
ITEM = {"type": "message", "role": "assistant", "content": "5", "id": "m"}
ANSWER = {"id": "resp_1", "status": "completed", "output": [ITEM]}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (b"", Unreachable, "could not reach"),
        (b"220 smtp.example.org ESMTP\r\n\r\n", Unreachable, "could not reach"),
        (HEAD + b'{"id"', StreamCut, "broke in the middle"),
    ],
)
async def test_broken_connection_is_a_retryable_error(
    response: bytes, kind: type[EngineError], message: str
) -> None:
    """A failure below HTTP raises a typed, retryable error with the Turn that was sent."""
    assert (await catch_error(kind, response, message)).retryable


@pytest.mark.parametrize(("sent", "expected"), [(b"", Unreachable), (HEAD + b'{"id"', StreamCut)])
async def test_timeout_is_a_typed_error(sent: bytes, expected: type[EngineError]) -> None:
    """The client's timeout applies before the response and in the middle of it."""
    # On a busy machine the start of the response may take longer than a short timeout.
    for timeout in (0.05, 1, 60):
        with serve_bytes(sent, keep_open=True) as url:
            async with connect(f"responses:{url}#m", max_retries=0, timeout=timeout) as engine:
                with pytest.raises((Unreachable, StreamCut)) as exc_info:
                    await engine.run(TURN)
        assert "in time" in str(exc_info.value) or "Timeout" in str(exc_info.value)
        assert exc_info.value.retryable
        assert exc_info.value.turn is TURN
        if isinstance(exc_info.value, expected):
            return
    pytest.fail(f"{exc_info.value!r} is not a {expected.__name__}")


async def test_client_retries_the_same_request() -> None:
    """Two failures and an answer give one answer to the same request, and an anchor."""
    busy = Response("busy", 500, headers={"retry-after-ms": "1"})
    server = RecordingServer(busy, busy, json_response(ANSWER))
    async with connect_to(server.handle, max_retries=2) as engine:
        turn = await engine.run(TURN)
    assert server.bodies == [server.bodies[0]] * 3
    assert [block.kind for block in turn.blocks] == ["user", "assistant"]
    assert get_state(turn).previous_response_id == "resp_1"


def test_engine_is_used_in_two_event_loops(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Two event loops use one engine without warnings; each loop has its own connection."""
    engine = connect(f"responses:{server.base_url}#practice")
    asyncio.run(engine.run(TURN))
    asyncio.run(engine.run(TURN))
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_connection_is_reused() -> None:
    """Requests reuse one connection, streamed or not."""
    ports: list[int] = []

    async def answer(request: Request) -> Response:
        assert request.client is not None
        ports.append(request.client.port)
        response = {**ANSWER, "id": f"resp_{len(ports)}"}
        if (await request.json())["stream"]:
            return sse_response({"type": "response.completed", "response": response})
        return json_response(response)

    async with connect_to(answer) as engine:
        for streaming in (False, True, True, False):
            await engine.run(TURN, streaming=streaming)
    assert len(ports) == 4
    assert len(set(ports)) == 1


LATER = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)


@for_each(
    ("headers", "least", "most"),
    [
        ({"retry-after": "2"}, 2, 2),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2, 2),
        ({"retry-after": LATER}, 1, 86_400),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0, 0),
        *(({"retry-after": value}, None, None) for value in ("inf", "nan", "-1", "soon", "")),
    ],
)
async def test_retry_after_is_read_in_every_form(
    headers: dict[str, str], least: float | None, most: float | None
) -> None:
    """A server may send seconds or a date, and OpenAI also sends milliseconds; other values are ignored."""
    delay = (await catch_error(RateLimited, Response("busy", 429, headers))).retry_after
    if least is None or most is None:
        assert delay is None
    else:
        assert delay is not None
        assert least <= delay <= most


async def test_deeply_nested_error_body_is_an_error_of_the_server() -> None:
    """A body that is nested too deeply to be parsed is the message of the error."""
    await catch_error(RequestRefused, Response("[" * 100_000, 400))


async def test_error_in_a_list_is_read() -> None:
    """Google's server of the Chat Completions API sends its errors in a list."""
    body = {"code": 429, "message": "Quota exceeded.", "status": "RESOURCE_EXHAUSTED"}
    error = await catch_error(RateLimited, json_response([{"error": body}], 429), api="chat")
    assert (error.message, error.code) == ("Quota exceeded.", "429")


async def test_truncated_message_contains_no_part_of_the_key() -> None:
    """A long error message is redacted before it is truncated, so that no part of the key is shown."""
    key = "sk-" + "7" * 40
    answer = Response("x" * (MAX_MESSAGE_LENGTH - 20) + key, 400)
    assert "sk-" not in str(await catch_error(RequestRefused, answer, api_key=key))


@for_each(
    ("header", "value"),
    [
        ("Authorization", f"Bearer {SECRET}"),
        ("Authorization", f"Bearer {SECRET}=="),
        ("Authorization", f'Digest username="{SECRET}", response="{SECRET}2"'),
        ("api-key", SECRET),
        ("Helicone-Auth", SECRET),
        ("Cookie", f"session={SECRET}"),
        ("Cookie", f"session={SECRET}; other={SECRET}="),
        ("cookie", f'a={SECRET};b="{SECRET} 2" ; {SECRET}'),
    ],
)
async def test_credentials_in_headers_are_redacted(header: str, value: str) -> None:
    """A message that repeats the credentials of a header is an error without them, as for an API key."""

    async def refuse(request: Request) -> Response:
        return Response(f"not valid: {request.headers[header]}", 401)

    error = await catch_error(
        NotAuthorized, refuse, r"not valid: (\w+ )?\*\*\*", default_headers={header: value}
    )
    assert SECRET not in str(error)


async def test_each_value_of_several_cookies_is_redacted() -> None:
    """A message that repeats only a value of one pair does not show it either."""
    headers = {"Cookie": 'session="first-1"; token=first-12=; theme=dark'}
    answer = Response("unknown: first-1, first-12=, dark", 401)
    expected = r"unknown: \*\*\*, \*\*\*, \*\*\*"
    await catch_error(NotAuthorized, answer, expected, default_headers=headers)


@for_each(
    ("status", "message", "retryable"),
    [
        (500, "image input is not supported", False),
        (500, "This model does not support tools", False),
        (501, "no", False),
        (500, "internal error", True),
        (503, "loading the model", True),
    ],
)
async def test_a_permanent_failure_is_not_retryable(
    status: int, message: str, retryable: bool
) -> None:
    """llama.cpp reports an unsupported request as HTTP 500; sending it again cannot help."""
    answer = json_response({"error": {"message": message, "code": status}}, status)
    assert (await catch_error(ServerFailed, answer)).retryable is retryable


@for_each("api", ["responses", "chat", "anthropic"])
@for_each("status", [301, 307])
async def test_redirect_is_not_followed(api: str, status: int) -> None:
    """A redirect cannot send the conversation and the key elsewhere; the error names the address."""
    elsewhere = RecordingServer(json_response({}))
    with serve_handler(elsewhere.handle) as other:
        headers = {"location": f"{other}/responses?token=secret"}
        moved = Response(status_code=status, headers=headers)
        match = f"redirects to {other}/responses;"
        error = await catch_error(RequestRefused, moved, match, api=api, api_key="sk-secret")
    assert elsewhere.paths == []
    assert (error.status, error.retryable) == (status, False)
