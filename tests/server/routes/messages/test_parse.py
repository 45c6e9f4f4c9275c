"""Validation of requests to ``/v1/messages`` and its error messages."""

from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.routes.message_errors import error_body
from kedge.server.routes.message_requests import parse_request
from kedge.testing import TestServer, serve
from server.waiting import TIMEOUT

USER = {"role": "user", "content": "Hello"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
CALL_MESSAGE = {"role": "assistant", "content": [TOOL_USE]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}
RESULT_MESSAGE = {"role": "user", "content": [RESULT]}
TEXT = {"type": "text", "text": "Well"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HEADERS = {"anthropic-version": "2023-06-01"}


def make_request(**members: Any) -> dict[str, Any]:
    return {"model": "practice", "max_tokens": 2000, "messages": [USER], **members}


def talk(*messages: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return a request with these messages."""
    return make_request(messages=list(messages), **members)


def decrypt_nothing(_: str) -> Any:
    return None


def request_without(name: str) -> dict[str, Any]:
    return {key: value for key, value in make_request().items() if key != name}


INVALID_REQUESTS: list[tuple[dict[str, Any], str]] = [
    (request_without("model"), "model: Field required"),
    (request_without("max_tokens"), "max_tokens: Field required"),
    (request_without("messages"), "messages: Field required"),
    (make_request(max_tokens=0), "max_tokens: Input should be greater than or equal to 1"),
    (make_request(max_tokens="5"), "max_tokens: Input should be a valid integer"),
    (make_request(mood=1), "mood: Extra inputs are not permitted"),
    (make_request(temperature=1), "temperature: Extra inputs are not permitted"),
    (talk(), "messages: at least one message is required"),
    (talk({"role": "user"}), "messages.0.content: Field required"),
    (
        talk({**USER, "role": "tool"}),
        "messages.0.role: Input should be 'user', ",
    ),
    (
        talk({**USER, "content": ""}),
        "messages.0: all messages must have non-empty",
    ),
    (
        talk({**USER, "content": [{"type": "text", "text": " "}]}),
        "messages: text content blocks must be non-empty",
    ),
    (
        talk({**USER, "content": [{"type": "text"}]}),
        "messages.0.content.0.text: Field required",
    ),
    (talk({**USER, "role": "system"}), "first message must use the"),
    (
        talk(USER, {**USER, "role": "assistant"}),
        "does not support assistant message",
    ),
    (
        talk(USER, CALL_MESSAGE),
        (
            "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: "
            "toolu_1. Each"
        ),
    ),
    (
        talk(USER, CALL_MESSAGE, USER),
        "messages.1: `tool_use` ids were found without",
    ),
    (
        talk(USER, CALL_MESSAGE, {"role": "user", "content": [TEXT, RESULT]}),
        "messages.1: `tool_use` ids were found without",
    ),
    (
        talk(RESULT_MESSAGE),
        "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_1.",
    ),
    (
        talk(USER, CALL_MESSAGE, RESULT_MESSAGE, {**USER, "role": "assistant"}, RESULT_MESSAGE),
        "messages.4.content.0: unexpected `tool_use_id`",
    ),
    (
        talk(USER, CALL_MESSAGE, {"role": "user", "content": [RESULT, RESULT]}),
        "each tool_use must have a single result",
    ),
    (
        talk(USER, {"role": "assistant", "content": [TOOL_USE, TOOL_USE]}, RESULT_MESSAGE),
        "messages.1.content.1: `tool_use` ids must be unique",
    ),
    (
        talk({"role": "user", "content": [TOOL_USE]}),
        "messages.0.content.0: `tool_use` blocks are not permitted within user messages",
    ),
    (
        talk(USER, {"role": "assistant", "content": [RESULT]}, USER),
        "`tool_result` blocks are not permitted within assistant messages",
    ),
    (make_request(tools=[{"name": "f"}]), "tools.0.input_schema: Field required"),
    (make_request(tools=[TOOL, TOOL]), "tools: Tool names must be unique."),
    (make_request(tools=[{**TOOL, "name": "a b"}]), "tools.0.name: String should match pattern"),
    (
        make_request(tools=[{"type": "web_search_1999", "name": "web_search"}]),
        "tools.0.type: Input should be 'custom'",
    ),
    (make_request(tool_choice={"type": "auto"}), "may only be specified while providing `tools`"),
    (
        make_request(tools=[TOOL], tool_choice={"type": "tool", "name": "g"}),
        "Tool 'g' not found in provided tools",
    ),
    (
        make_request(thinking={"type": "enabled", "budget_tokens": 5}),
        "thinking.budget_tokens: Input should be greater than or equal to 1024",
    ),
    (
        make_request(thinking={"type": "enabled", "budget_tokens": 2000}),
        "`max_tokens` must be greater than `thinking.budget_tokens`.",
    ),
    (
        make_request(
            tools=[TOOL],
            tool_choice={"type": "any"},
            thinking={"type": "enabled", "budget_tokens": 1024},
        ),
        "Thinking may not be enabled when tool_choice forces tool use.",
    ),
]


@for_each(("body", "message"), INVALID_REQUESTS)
def test_invalid_request_is_rejected(body: dict[str, Any], message: str) -> None:
    """An invalid request is rejected with Anthropic's message, which starts with the path of the field."""
    with pytest.raises(ApiError) as exc_info:
        parse_request(body, decrypt_nothing)
    error = error_body(exc_info.value, "req_1")
    assert error["type"] == "error"
    assert error["request_id"] == "req_1"
    assert error["error"]["type"] == "invalid_request_error"
    assert message in error["error"]["message"]


VALID_REQUESTS: list[dict[str, Any]] = [
    make_request(),
    talk(USER, USER),
    talk(USER, CALL_MESSAGE, RESULT_MESSAGE),
    talk(USER, CALL_MESSAGE, {"role": "user", "content": [RESULT, TEXT]}),
    talk(USER, CALL_MESSAGE, RESULT_MESSAGE, USER),
    talk(USER, {"role": "system", "content": "Now in French."}),
    make_request(system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
    make_request(tools=[{**TOOL, "type": "custom"}], tool_choice={"type": "auto"}),
    make_request(stop_sequences=["x"], metadata={"user_id": "u"}, stream=True),
    make_request(thinking={"type": "adaptive"}, output_config={"effort": "low"}),
    make_request(
        thinking={"type": "adaptive"}, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}
    ),
    talk({**USER, "role": "assistant"}, USER),
    talk(
        USER,
        CALL_MESSAGE,
        {
            "role": "user",
            "content": [{**RESULT, "content": [{"type": "tool_reference", "tool_name": "g"}]}],
        },
    ),
    make_request(
        tools=[{"type": "memory_20250818", "name": "memory"}, TOOL],
        tool_choice={"type": "tool", "name": "memory"},
    ),
    make_request(
        mcp_servers=[{"type": "url", "name": "m", "url": "https://a.example/mcp"}],
        tools=[{"type": "mcp_toolset", "mcp_server_name": "m"}],
        context_management={"edits": [{"type": "compact_20260112"}]},
        output_config={"task_budget": {"type": "tokens", "total": 20_000, "remaining": 500}},
    ),
]


@for_each("body", VALID_REQUESTS)
def test_valid_request_is_accepted(body: dict[str, Any]) -> None:
    """Requests that the API accepts are accepted, including consecutive messages of one role."""
    assert parse_request(body, decrypt_nothing)["input"]


def test_tools_of_the_provider_are_not_offered_to_the_model() -> None:
    """Hosted tools are accepted; their calls and results, and a choice of them, have no effect."""
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    question = parse_request(
        talk(
            USER,
            {"role": "assistant", "content": [use, result, TEXT]},
            USER,
            tools=[hosted, TOOL],
            tool_choice={"type": "tool", "name": "web_search"},
        ),
        decrypt_nothing,
    )
    assert [item["role"] for item in question["input"]] == ["user", "assistant", "user"]
    assert [tool["name"] for tool in question["tools"]] == ["f"]
    assert "tool_choice" not in question
    alone = make_request(tools=[hosted], tool_choice={"type": "any"})
    assert "tools" not in parse_request(alone, decrypt_nothing)


def test_older_versions_accept_sampling_parameters() -> None:
    """Older API versions still accept sampling parameters."""
    question = parse_request(make_request(temperature=0.5, top_k=3), decrypt_nothing, "2023-06-01")
    assert (question["temperature"], question["top_k"]) == (0.5, 3)


def test_parameters_are_converted_to_the_responses_api() -> None:
    """Parameters are converted to those of the Responses API, so that a model sees one format."""
    question = parse_request(
        make_request(
            system="Be kind.",
            tools=[{**TOOL, "description": "d", "strict": True}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            thinking={"type": "adaptive"},
            output_config={
                "effort": "high",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
        ),
        decrypt_nothing,
    )
    del question["input"], question["stop"]
    assert question == {
        "model": "practice",
        "truncation": "disabled",
        "instructions": "Be kind.",
        "tools": [
            {
                "type": "function",
                "name": "f",
                "parameters": {"type": "object"},
                "strict": True,
                "description": "d",
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {
            "format": {
                "type": "json_schema",
                "name": "answer",
                "strict": True,
                "schema": {"type": "object"},
            }
        },
        "max_output_tokens": 2000,
    }


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "anthropic-version: header is required"),
        ({"anthropic-version": "1999"}, 'anthropic-version: "1999" is not a valid version'),
    ],
)
def test_version_header_is_required(
    server: TestServer, headers: dict[str, str], message: str
) -> None:
    """A missing or invalid version header is rejected before the body is validated."""
    answer = httpx2.post(f"{server.base_url}/messages", json={}, headers=headers, timeout=TIMEOUT)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
    assert answer.json()["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ],
)
def test_key_is_accepted_in_either_header(headers: dict[str, str], status: int) -> None:
    """The key is read from ``x-api-key`` or ``authorization``; a wrong key gets Anthropic's error format."""
    with serve(token="secret") as server:
        answer = httpx2.post(
            f"{server.base_url}/messages",
            json=make_request(),
            headers=HEADERS | headers,
            timeout=TIMEOUT,
        )
        other = httpx2.get(
            f"{server.base_url}/models", headers={"x-api-key": "secret"}, timeout=TIMEOUT
        )
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
    assert other.status_code == 401  # elsewhere a key is a bearer token


@pytest.mark.parametrize(
    ("method", "path", "raw", "status", "kind"),
    [
        ("GET", "/messages", b"", 405, "invalid_request_error"),
        ("POST", "/messages/else", b"", 404, "not_found_error"),
        ("POST", "/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/messages", b"[]", 400, "invalid_request_error"),
    ],
)
def test_http_errors_have_anthropics_format(
    server: TestServer, method: str, path: str, raw: bytes, status: int, kind: str
) -> None:
    """Errors about routes, methods and malformed bodies have Anthropic's format."""
    answer = httpx2.request(
        method,
        f"{server.base_url}{path}",
        content=raw,
        headers={"content-type": "application/json", **HEADERS},
        timeout=TIMEOUT,
    )
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind


def test_nested_blocks_are_flattened() -> None:
    """A search result and a document made of blocks are converted to their parts."""
    result = {"type": "search_result", "title": "T", "source": "S", "content": [TEXT]}
    document = {"type": "document", "source": {"type": "content", "content": [TEXT]}}
    body = talk({"role": "user", "content": [result, document]})
    (message,) = parse_request(body, decrypt_nothing)["input"]
    assert [part["text"] for part in message["content"]] == ["T (S)", "Well", "Well"]
