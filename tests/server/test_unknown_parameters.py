"""Unknown parameters: rejected for the practice model, ignored for other models."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from anthropic_sdk import make_anthropic
from for_each import for_each
from kedge.errors import InvalidSetting
from kedge.providers import open_model
from kedge.testing import TestServer, serve
from server.conftest import open_client
from server.websocket_client import connect_client

HEADER = "x-kedge-ignored-parameters"
TEXT = {"type": "text", "text": "Hello"}
USER = {"role": "user", "content": "Hello"}
CODEX_MESSAGE = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Hello"}],
    "internal_chat_message_metadata_passthrough": {"turn_id": "1"},
}
CODEX_REQUEST: dict[str, Any] = {
    "model": "m",
    "input": [CODEX_MESSAGE, CODEX_MESSAGE],
    "tools": [{"type": "web_search", "search_content_types": ["text", "image"]}],
    "client_metadata": {"session": "x"},
}
CLAUDE_REQUEST: dict[str, Any] = {
    "model": "m",
    "max_tokens": 500,
    "system": [TEXT | {"cache_control": {"type": "ephemeral", "scope": "global"}}],
    "messages": [{"role": "user", "content": [TEXT]}],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "fallbacks": "default",
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
    "provider_specific_fields": {},
}
CALL_MESSAGE = {
    "role": "assistant",
    "content": None,
    "provider_specific_fields": {"refusal": None},
    "tool_calls": [CALL],
}
CHAT_REQUEST: dict[str, Any] = {
    "model": "m",
    "messages": [USER, CALL_MESSAGE, {"role": "tool", "tool_call_id": "call_1", "content": "done"}],
}
ANSWER = {"role": "assistant", "content": [{"type": "thinking", "thinking": []}, TEXT]}
VIDEO = {"type": "video_url", "video_url": {"url": "https://a.example/v"}}
OTHER_CHAT = {
    "model": "m",
    "messages": [
        {**USER, "name": None},
        {**ANSWER, "tool_calls": []},
        {"role": "user", "content": [VIDEO]},
    ],
    "tools": [
        {"function": {"name": "f", "parameters": {"type": "object"}}},
        {"type": "openrouter:web_search"},
    ],
    "tool_choice": "any",
    "service_tier": "on_demand",
    "reasoning_effort": "default",
}
DEEPSEEK_ITEMS = [
    USER,
    {"type": "reasoning", "id": "76f8b89e-4a41", "summary": []},
    {"type": "message", "role": "assistant", "content": "Hi", "id": "rs-a"},
    USER,
]
HELLO = {"model": "m", "input": "Hello", "client_metadata": {}}
REQUESTS: list[tuple[str, dict[str, Any], set[str]]] = [
    (
        "/v1/responses",
        CODEX_REQUEST,
        {
            "client_metadata",
            "input[].internal_chat_message_metadata_passthrough",
            "tools[].search_content_types",
        },
    ),
    ("/v1/messages", CLAUDE_REQUEST, {"fallbacks", "system[].cache_control.scope"}),
    (
        "/v1/messages/count_tokens",
        {key: CLAUDE_REQUEST[key] for key in ("model", "messages", "fallbacks")},
        {"fallbacks"},
    ),
    (
        "/v1/chat/completions",
        CHAT_REQUEST,
        {"messages[].provider_specific_fields", "messages[].tool_calls[].provider_specific_fields"},
    ),
    (
        "/v1/chat/completions",
        OTHER_CHAT,
        {"messages[].name", "messages[].content[].thinking", "messages[].tool_calls"}
        | {"tools[].openrouter:web_search", "service_tier", "reasoning_effort"},
    ),
    ("/v1/responses", {"model": "m", "input": DEEPSEEK_ITEMS}, {"input[].id"}),
    ("/v1/responses/compact", HELLO, {"client_metadata"}),
    ("/v1/conversations", {"client_metadata": {}}, {"client_metadata"}),
]
"""Requests of Codex, Claude Code, LiteLLM, clients of several providers, and DeepSeek, with what is ignored."""


@pytest.fixture
def server() -> Iterator[TestServer]:
    with serve(unknown_parameters="ignore") as running:
        yield running


def post(server: TestServer, path: str, body: Any) -> httpx2.Response:
    with open_client(server, **{"anthropic-version": "2023-06-01"}) as http:
        return http.post(path, json=body)


@for_each(("path", "body", "ignored"), REQUESTS)
def test_unknown_parameters_are_ignored_and_listed(
    server: TestServer, path: str, body: Any, ignored: set[str]
) -> None:
    """Unknown parameters are ignored and listed in a header, or rejected, which is the default."""
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[HEADER].split(", ")) == ignored
    with serve() as strict:
        rejected = post(strict, path, body)
    assert rejected.status_code == 400
    assert HEADER not in rejected.headers


async def test_ignored_members_are_listed_logged_once_and_not_stored(
    server: TestServer, client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams list them in a header, and WebSockets ignore them too, because Codex uses one."""
    caplog.set_level(logging.WARNING, "kedge.server")
    raw = client.responses.with_raw_response.create(
        model="m", input="Hello", stream=True, extra_body={"client_metadata": {"a": "b"}}
    )
    assert raw.headers[HEADER] == "client_metadata"
    assert list(raw.parse())[-1].type == "response.completed"
    response = post(server, "/v1/responses", CODEX_REQUEST).json()
    items = client.responses.input_items.list(response["id"]).data
    assert "passthrough" not in str([item.model_dump() for item in items])
    assert response["tools"] == [{"type": "web_search"}]
    async with connect_client(server) as socket:
        await socket.send(type="response.create", **CODEX_REQUEST)
        assert (await socket.read_response())[-1]["type"] == "response.completed"
    lines = [record.message for record in caplog.records if "client_metadata" in record.message]
    assert len(lines) == 1
    assert "--unknown-parameters" in lines[0]


def test_names_cannot_forge_a_header_or_a_log_line(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Names with control characters or of great length are escaped and truncated, and at most 32 are listed."""
    plain = {"model": "m", "input": "Hi"}
    odd = post(server, "/v1/responses", plain | {"a\r\nx-evil: 1, b": 1, "é" * 200: 2})
    assert odd.headers[HEADER] == f"a??x-evil:?1??b, {'?' * 100}"
    assert "\r\nx-evil" not in caplog.text
    many = post(server, "/v1/responses", plain | {f"unknown_{n}": 1 for n in range(500)})
    assert len(many.headers[HEADER].split(", ")) == 32
    assert HEADER not in post(server, "/v1/responses", plain).headers


@for_each(
    ("path", "change", "param"),
    [
        ("/v1/responses", {"temperature": 5}, "temperature"),
        ("/v1/responses", {"input": [{"type": "odd"}]}, "input[0]"),
        ("/v1/responses", {"response_format": {}}, None),
        ("/v1/chat/completions", {"tool_choice": "odd"}, "tool_choice"),
        ("/v1/chat/completions", {"functions": []}, "functions"),
    ],
)
def test_known_parameters_are_still_validated(
    server: TestServer, path: str, change: Any, param: str | None
) -> None:
    """Values, required members, item types and moved parameters of other APIs are still checked."""
    base = CODEX_REQUEST if path == "/v1/responses" else CHAT_REQUEST
    answer = post(server, path, {**base, **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param or "has moved to 'text.format'" in error["message"]


def test_unknown_parameters_are_ignored_for_an_engine_model() -> None:
    """A server with an engine model ignores unknown parameters by default; the setting overrides that."""
    with serve() as upstream:

        def status(**settings: Any) -> int:
            model = open_model(f"chat:{upstream.base_url}#practice")
            with serve(model=model, **settings) as server:
                body = {key: CODEX_REQUEST[key] for key in ("model", "input", "client_metadata")}
                return post(server, "/v1/responses", body).status_code

        assert status() == 200
        assert status(unknown_parameters="reject") == 400
        with pytest.raises(InvalidSetting, match="ignore or reject, not 'bogus'"):
            status(unknown_parameters="bogus")
    assert "client_metadata" not in str(upstream.requests[-1].body)


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
