"""Unknown parameters: rejected for the practice model, ignored for other models."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from anthropic_sdk import make_anthropic
from for_each import for_each
from kedge.backends import open_model
from kedge.errors import InvalidSetting
from kedge.testing import TestServer, serve
from server.waiting import TIMEOUT
from server.websocket_client import connect_client

HEADER = "x-kedge-ignored-parameters"
WEB_SEARCH = {"type": "web_search", "search_content_types": ["text", "image"]}
CODEX_MESSAGE = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Hello"}],
    "internal_chat_message_metadata_passthrough": {"turn_id": "1"},
}
CODEX_REQUEST: dict[str, Any] = {
    "model": "m",
    "input": [CODEX_MESSAGE, CODEX_MESSAGE],
    "tools": [WEB_SEARCH],
    "client_metadata": {"session": "x"},
}
CODEX_IGNORED = (
    "client_metadata, "
    "input[].internal_chat_message_metadata_passthrough, tools[].search_content_types"
)
CLAUDE_REQUEST: dict[str, Any] = {
    "model": "m",
    "max_tokens": 500,
    "system": [
        {
            "type": "text",
            "text": "Be brief.",
            "cache_control": {"type": "ephemeral", "scope": "global"},
        }
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "fallbacks": "default",
}
CHAT_REQUEST: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": None,
            "provider_specific_fields": {"refusal": None},
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": "{}"},
                    "provider_specific_fields": {},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
}
VERSION = {"anthropic-version": "2023-06-01"}
REQUESTS = {
    "codex": ("/v1/responses", CODEX_REQUEST, CODEX_IGNORED),
    "claude": (
        "/v1/messages",
        CLAUDE_REQUEST,
        "fallbacks, system[].cache_control.scope",
    ),
    "claude, counting": (
        "/v1/messages/count_tokens",
        {key: CLAUDE_REQUEST[key] for key in ("model", "messages", "fallbacks")},
        "fallbacks",
    ),
    "litellm": (
        "/v1/chat/completions",
        CHAT_REQUEST,
        "messages[].provider_specific_fields, messages[].tool_calls[].provider_specific_fields",
    ),
    "mistral, groq, openrouter": (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "Hello", "name": None},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": []},
                        {"type": "text", "text": "Hi"},
                    ],
                    "tool_calls": [],
                },
                {
                    "role": "user",
                    "content": [{"type": "video_url", "video_url": {"url": "https://a.example/v"}}],
                },
            ],
            "tools": [
                {"function": {"name": "f", "parameters": {"type": "object"}}},
                {"type": "openrouter:web_search"},
            ],
            "tool_choice": "any",
            "service_tier": "on_demand",
            "reasoning_effort": "default",
        },
        (
            "messages[].name, messages[].content[].thinking, messages[].tool_calls, "
            "tools[].openrouter:web_search, service_tier, reasoning_effort"
        ),
    ),
    "deepseek": (
        "/v1/responses",
        {
            "model": "m",
            "input": [
                {"role": "user", "content": "Hello"},
                {"type": "reasoning", "id": "76f8b89e-4a41", "summary": []},
                {"type": "message", "role": "assistant", "content": "Hi", "id": "rs-a"},
                {"role": "user", "content": "Hello again"},
            ],
        },
        "input[].id",
    ),
    "compact": (
        "/v1/responses/compact",
        {"model": "m", "input": "Hello", "client_metadata": {}},
        "client_metadata",
    ),
    "tokens": (
        "/v1/responses/input_tokens",
        {"model": "m", "input": "Hello", "client_metadata": {}},
        "client_metadata",
    ),
    "conversation": ("/v1/conversations", {"client_metadata": {}}, "client_metadata"),
}


@pytest.fixture
def server() -> Iterator[TestServer]:
    with serve(unknown_parameters="ignore") as running:
        yield running


HTTP = httpx2.Client(verify=False, timeout=TIMEOUT)


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    HTTP.close()


def post(server: TestServer, path: str, body: Any) -> Any:
    return HTTP.post(f"{server.url}{path}", json=body, headers=VERSION)


@pytest.mark.parametrize("name", REQUESTS)
def test_unknown_parameters_are_ignored_and_listed(server: TestServer, name: str) -> None:
    """Unknown parameters that Codex, Claude Code and LiteLLM send are ignored and listed in a header."""
    path, body, ignored = REQUESTS[name]
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers[HEADER].split(", ")) == sorted(ignored.split(", "))


@for_each("name", REQUESTS)
def test_unknown_parameters_are_rejected_by_default(name: str) -> None:
    """The practice model rejects unknown parameters, as the hosted APIs do."""
    path, body, _ = REQUESTS[name]
    with serve() as server:
        answer = post(server, path, body)
    assert answer.status_code == 400
    assert HEADER not in answer.headers


def test_stream_lists_ignored_parameters(client: OpenAI) -> None:
    """The ignored parameters of a stream are listed in its headers."""
    more: Any = {"extra_body": {"client_metadata": {"a": "b"}}}
    raw = client.responses.with_raw_response.create(model="m", input="Hello", stream=True, **more)
    assert raw.headers[HEADER] == "client_metadata"
    assert list(raw.parse())[-1].type == "response.completed"


def test_ignored_members_are_not_stored(server: TestServer, client: OpenAI) -> None:
    """Ignored members are removed from the stored items and tools."""
    response = post(server, "/v1/responses", CODEX_REQUEST).json()
    items = client.responses.input_items.list(response["id"]).data
    assert "passthrough" not in str([item.model_dump() for item in items])
    assert response["tools"] == [{"type": "web_search"}]


def test_each_parameter_is_logged_once(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter that an agent sends with every request is logged once."""
    caplog.set_level(logging.WARNING, "kedge.server")
    for _ in range(3):
        post(server, "/v1/responses", CODEX_REQUEST)
    lines = [record.message for record in caplog.records if "client_metadata" in record.message]
    assert len(lines) == 1
    assert "--unknown-parameters" in lines[0]


def test_names_cannot_forge_a_header_or_a_log_line(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A name with control characters or of great length is escaped and truncated."""
    body = {"model": "m", "input": "Hi", "a\r\nx-evil: 1, b": 1, "é" * 200: 2}
    answer = post(server, "/v1/responses", body)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == f"a??x-evil:?1??b, {'?' * 100}"
    assert "\r\nx-evil" not in caplog.text


def test_list_of_ignored_parameters_is_bounded(server: TestServer) -> None:
    """All unknown parameters are ignored, and at most 32 are listed; without any there is no header."""
    plain = {"model": "m", "input": "Hi"}
    assert HEADER not in post(server, "/v1/responses", plain).headers
    body = plain | {f"unknown_{number}": 1 for number in range(500)}
    assert len(post(server, "/v1/responses", body).headers[HEADER].split(", ")) == 32


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/responses", {"temperature": 5}, "temperature"),
        ("/v1/responses", {"input": [{"type": "odd"}]}, "input[0]"),
        ("/v1/responses", {"tools": [{"type": "odd"}]}, "tools[0].type"),
        ("/v1/responses", {"previous_response_id": "a b"}, "previous_response_id"),
        ("/v1/chat/completions", {"tool_choice": "odd"}, "tool_choice"),
        ("/v1/chat/completions", {"functions": []}, "functions"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_known_parameters_are_still_validated(
    server: TestServer, path: str, change: Any, param: str
) -> None:
    """Values, required members, item types and parameters of other APIs are still checked."""
    base = CODEX_REQUEST if path == "/v1/responses" else CHAT_REQUEST
    answer = post(server, path, {**base, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_unknown_parameters_are_ignored_for_a_backend() -> None:
    """A server with a backend ignores unknown parameters by default; the setting overrides that."""
    with serve() as upstream:

        def status(**settings: Any) -> int:
            model = open_model(f"chat:{upstream.base_url}#practice")
            with serve(model=model, **settings) as server:
                body = {key: CODEX_REQUEST[key] for key in ("model", "input", "client_metadata")}
                return post(server, "/v1/responses", body).status_code

        assert status() == 200
        assert status(unknown_parameters="reject") == 400
    assert "client_metadata" not in str(upstream.requests[-1].body)


async def test_websocket_ignores_unknown_parameters(server: TestServer) -> None:
    """Unknown parameters are ignored on a WebSocket too, because Codex uses one."""
    async with connect_client(server) as socket:
        await socket.send(type="response.create", **CODEX_REQUEST)
        last = (await socket.read_response())[-1]
    assert last["type"] == "response.completed"


def test_an_unknown_policy_is_rejected() -> None:
    """An invalid value of the setting is an error."""
    with (
        pytest.raises(InvalidSetting, match="ignore or reject, not 'bogus'"),
        serve(unknown_parameters="bogus"),
    ):
        pytest.fail("the server was started")


@pytest.mark.parametrize("unknown_parameters", ["ignore", "reject"])
def test_anthropic_tool_runner_continues_without_threads(unknown_parameters: str) -> None:
    """After the error for ``thread``, the tool runner sends the complete conversation."""
    from anthropic import beta_tool

    @beta_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    with (
        serve(unknown_parameters=unknown_parameters) as server,
        make_anthropic(server.url) as client,
    ):
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=500,
            tools=[get_weather],
            messages=[{"role": "user", "content": "call get_weather in Rome"}],
        )
        final = runner.until_done()
    assert final.content[-1].type == "text"
    assert "sunny in Rome" in final.content[-1].text
    assert any("thread" in request.body for request in server.requests)
    assert "thread" not in server.requests[-1].body


def test_a_thread_is_rejected_with_its_code(server: TestServer) -> None:
    """``thread`` is rejected, because the client would then send only its newest message."""
    from anthropic import BadRequestError

    with (
        make_anthropic(server.url) as client,
        pytest.raises(BadRequestError) as exc_info,
    ):
        client.beta.messages.create(
            model="m",
            max_tokens=10,
            messages=[{"role": "user", "content": "Hi"}],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )
    assert exc_info.value.error_code == "thread_unsupported_request"


def test_moved_parameter_is_rejected(client: OpenAI) -> None:
    """A moved parameter gets the hosted API's error even if unknown parameters are ignored."""
    with pytest.raises(openai.BadRequestError) as exc_info:
        client.responses.create(model="m", input="Hi", extra_body={"response_format": {}})
    assert "has moved to 'text.format'" in exc_info.value.message
