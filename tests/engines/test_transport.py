"""Test the HTTP transport: retries of the client, timeouts, and the errors for failures."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import (
    json_response,
    make_handler,
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
from kedge.turns import Turn, user

TURN = Turn([user("What is 2+3?")])
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
    with serve_bytes(response) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(kind, match=message) as exc_info:
                await engine.run(TURN)
    assert exc_info.value.retryable
    assert exc_info.value.turn is TURN


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
    bodies: list[bytes] = []

    async def answer(request: Request) -> Response:
        bodies.append(await request.body())
        if len(bodies) < 3:
            return Response("busy", 500, headers={"retry-after-ms": "1"})
        return json_response(ANSWER)

    with serve_handler(answer) as url:
        async with connect(f"responses:{url}#m") as engine:
            turn = await engine.run(TURN)
    assert len(set(bodies)) == 1
    assert len(bodies) == 3
    assert [block.kind for block in turn.blocks] == ["user", "assistant"]
    assert get_state(turn).previous_response_id == "resp_1"


async def test_rejected_request_is_not_retried() -> None:
    """A permanent error is raised at once."""
    requests: list[str] = []

    async def answer(request: Request) -> Response:
        requests.append(request.url.path)
        return json_response({"error": {"message": "no", "code": "invalid_value"}}, 400)

    with serve_handler(answer) as url:
        async with connect(f"responses:{url}#m") as engine:
            with pytest.raises(RequestRefused):
                await engine.run(TURN)
    assert requests == ["/v1/responses"]


async def test_failure_is_raised_after_the_last_retry() -> None:
    """The error after the last retry has the unchanged Turn."""
    attempts: list[str] = []

    async def answer(request: Request) -> Response:
        attempts.append(request.url.path)
        return Response("busy", 500, headers={"retry-after-ms": "1"})

    with serve_handler(answer) as url:
        async with connect(f"responses:{url}#m", max_retries=1) as engine:
            with pytest.raises(ServerFailed) as exc_info:
                await engine.run(TURN)
    assert len(attempts) == 2
    assert exc_info.value.turn is TURN


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

    with serve_handler(answer) as url:
        async with connect(f"responses:{url}#m") as engine:
            for streaming in (False, True, True, False):
                await engine.run(TURN, streaming=streaming)
    assert len(ports) == 4
    assert len(set(ports)) == 1


LATER = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"retry-after": "2"}, 2, 2),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2, 2),
        ({"retry-after": LATER}, 1, 86_400),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0, 0),
    ],
    ids=["seconds", "milliseconds", "invalid milliseconds", "a date", "a past date"],
)
async def test_retry_after_is_read_in_every_form(
    headers: dict[str, str], least: float, most: float
) -> None:
    """A server may send seconds or a date, and OpenAI also sends milliseconds."""
    with serve_handler(make_handler(lambda: Response("busy", 429, headers))) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(RateLimited) as exc_info:
                await engine.run(TURN)
    assert exc_info.value.retry_after is not None
    assert least <= exc_info.value.retry_after <= most


async def test_deeply_nested_error_body_is_an_error_of_the_server() -> None:
    """A body that is nested too deeply to be parsed is the message of the error."""
    with serve_handler(make_handler(lambda: Response("[" * 100_000, 400))) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(RequestRefused):
                await engine.run(TURN)


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "soon", ""])
async def test_invalid_retry_after_is_ignored(value: str) -> None:
    """A ``retry-after`` header that is not a valid number of seconds is ignored."""

    async def busy(_: Request) -> Response:
        return Response("busy", 429, {"retry-after": value})

    with serve_handler(busy) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(RateLimited) as exc_info:
                await engine.run(TURN)
    assert exc_info.value.retry_after is None


async def test_error_in_a_list_is_read() -> None:
    """Google's server of the Chat Completions API sends its errors in a list."""
    error = {"code": 429, "message": "Quota exceeded.", "status": "RESOURCE_EXHAUSTED"}

    async def answer(request: Request) -> Response:
        await request.body()
        return json_response([{"error": error}], 429)

    with serve_handler(answer) as url:
        async with connect(f"chat:{url}#m", max_retries=0) as engine:
            with pytest.raises(RateLimited) as exc_info:
                await engine.run(TURN)
    assert (exc_info.value.message, exc_info.value.code) == ("Quota exceeded.", "429")


async def test_truncated_message_contains_no_part_of_the_key() -> None:
    """A long error message is redacted before it is truncated, so that no part of the key is shown."""
    key = "sk-" + "7" * 40

    async def refuse(_: Request) -> Response:
        return Response("x" * (MAX_MESSAGE_LENGTH - 20) + key, 400)

    with serve_handler(refuse) as url:
        async with connect(f"responses:{url}#m", max_retries=0, api_key=key) as engine:
            with pytest.raises(RequestRefused) as exc_info:
                await engine.run(TURN)
    assert "sk-" not in str(exc_info.value)


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

    with serve_handler(refuse) as url:
        async with connect(f"responses:{url}#m", default_headers={header: value}) as engine:
            with pytest.raises(NotAuthorized, match=r"not valid: (\w+ )?\*\*\*") as exc_info:
                await engine.run(TURN)
    assert SECRET not in str(exc_info.value)


async def test_each_value_of_several_cookies_is_redacted() -> None:
    """A message that repeats only a value of one pair does not show it either."""
    cookies = 'session="first-1"; token=first-12=; theme=dark'

    async def refuse(_: Request) -> Response:
        return Response("unknown: first-1, first-12=, dark", 401)

    with serve_handler(refuse) as url:
        async with connect(f"responses:{url}#m", default_headers={"Cookie": cookies}) as engine:
            with pytest.raises(NotAuthorized, match=r"unknown: \*\*\*, \*\*\*, \*\*\*"):
                await engine.run(TURN)


@pytest.mark.parametrize(
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

    async def fail(_: Request) -> Response:
        return json_response({"error": {"message": message, "code": status}}, status)

    with serve_handler(fail) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            with pytest.raises(ServerFailed) as exc_info:
                await engine.run(TURN)
    assert exc_info.value.retryable is retryable


@pytest.mark.parametrize("model", ["responses:{}#m", "chat:{}#m", "anthropic:m"])
@pytest.mark.parametrize("status", [301, 307])
async def test_redirect_is_not_followed(
    model: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect cannot send the conversation and the key elsewhere; the error names the address."""
    received: list[str] = []

    async def record(request: Request) -> Response:
        received.append(request.url.path)
        return json_response({})

    with serve_handler(record) as other:
        location = f"{other}/responses?token=secret"
        moved = make_handler(lambda: Response(status_code=status, headers={"location": location}))
        with serve_handler(moved) as base_url:
            monkeypatch.setenv("ANTHROPIC_BASE_URL", base_url)
            engine = connect(model.format(base_url), api_key="sk-secret")
            with pytest.raises(
                RequestRefused, match=f"redirects to {other}/responses;"
            ) as exc_info:
                await engine.run(TURN)
            await engine.aclose()
    assert received == []
    assert (exc_info.value.status, exc_info.value.retryable) == (status, False)
