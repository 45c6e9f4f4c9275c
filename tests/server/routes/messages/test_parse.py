"""Validation of requests to ``/v1/messages`` and its error messages."""

from typing import Any

import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.routes.message_errors import error_body
from kedge.server.routes.message_requests import parse_request
from kedge.testing import TestServer, serve
from server.conftest import open_client

USER = {"role": "user", "content": "Hello"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
CALL_MESSAGE = {"role": "assistant", "content": [TOOL_USE]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}
RESULT_MESSAGE = {"role": "user", "content": [RESULT]}
TEXT = {"type": "text", "text": "Well"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def make_request(**members: Any) -> dict[str, Any]:
    return {"model": "practice", "max_tokens": 2000, "messages": [USER], **members}


def talk(*messages: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return a request with these messages."""
    return make_request(messages=list(messages), **members)


def parse(body: dict[str, Any], version: str = "") -> dict[str, Any]:
    """Parse a request to a server that can decrypt nothing."""
    return parse_request(body, lambda _: None, *filter(None, [version]))


NO_RESULT = "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_1. Each"
ASSISTANT = {**USER, "role": "assistant"}


def say(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


INVALID_MESSAGES: list[tuple[list[Any], str]] = [
    ([], "messages: at least one message is required"),
    ([{**USER, "role": "tool"}], "messages.0.role: Input should be 'user', "),
    ([{**USER, "content": ""}], "messages.0: all messages must have non-empty"),
    ([say({"type": "text", "text": " "})], "messages: text content blocks must be non-empty"),
    ([say({"type": "text"})], "messages.0.content.0.text: Field required"),
    ([{**USER, "role": "system"}], "first message must use the"),
    ([USER, ASSISTANT], "does not support assistant message"),
    ([USER, CALL_MESSAGE, USER], NO_RESULT),
    ([USER, CALL_MESSAGE, say(TEXT, RESULT)], NO_RESULT),
    (
        [USER, CALL_MESSAGE, RESULT_MESSAGE, ASSISTANT, RESULT_MESSAGE],
        "messages.4.content.0: unexpected `tool_use_id`",
    ),
    ([USER, CALL_MESSAGE, say(RESULT, RESULT)], "each tool_use must have a single result"),
    (
        [USER, say(TOOL_USE, TOOL_USE, role="assistant"), RESULT_MESSAGE],
        "messages.1.content.1: `tool_use` ids must be unique",
    ),
    (
        [say(TOOL_USE)],
        "messages.0.content.0: `tool_use` blocks are not permitted within user messages",
    ),
    (
        [USER, say(RESULT, role="assistant"), USER],
        "`tool_result` blocks are not permitted within assistant messages",
    ),
]
THINKING = {"type": "enabled", "budget_tokens": 1024}
INVALID_MEMBERS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": ...}, "max_tokens: Field required"),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    (
        {"stop_sequences": ["x", " \n"]},
        "stop_sequences: each stop sequence must contain non-whitespace",
    ),
    ({"mood": 1}, "mood: Extra inputs are not permitted"),
    ({"temperature": 1}, "temperature: Extra inputs are not permitted"),
    ({"tools": [TOOL, TOOL]}, "tools: Tool names must be unique."),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name: String should match pattern"),
    (
        {"tools": [{"type": "web_search_1999", "name": "x"}]},
        "tools.0.type: Input should be 'custom'",
    ),
    ({"tool_choice": {"type": "auto"}}, "may only be specified while providing `tools`"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "Tool 'g' not found in provided tools",
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        "`max_tokens` must be greater than `thinking.budget_tokens`.",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "thinking": THINKING},
        "Thinking may not be enabled when tool_choice forces tool use.",
    ),
]
INVALID_REQUESTS = [
    *INVALID_MEMBERS,
    *(({"messages": messages}, message) for messages, message in INVALID_MESSAGES),
]


@for_each(("members", "message"), INVALID_REQUESTS)
def test_invalid_request_is_rejected(members: dict[str, Any], message: str) -> None:
    """An invalid request is rejected with Anthropic's message, which starts with the path of the field."""
    body = {name: value for name, value in make_request(**members).items() if value is not ...}
    with pytest.raises(ApiError) as exc_info:
        parse(body)
    error = error_body(exc_info.value, "req_1")
    assert (error["type"], error["request_id"]) == ("error", "req_1")
    assert error["error"]["type"] == "invalid_request_error"
    assert message in error["error"]["message"]


IMAGES = [
    {"type": "image", "source": {"type": "url", "url": "u"}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
]
VALID_REQUESTS: list[dict[str, Any]] = [
    talk(USER, USER),
    talk(USER, CALL_MESSAGE, say(RESULT, TEXT)),
    talk(USER, CALL_MESSAGE, RESULT_MESSAGE, USER),
    talk(USER, {"role": "system", "content": "Now in French."}),
    make_request(system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
    make_request(stop_sequences=["x"], metadata={"user_id": "u"}, stream=True),
    make_request(
        thinking={"type": "adaptive"}, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}
    ),
    talk(ASSISTANT, say(*IMAGES)),
    talk(
        USER,
        CALL_MESSAGE,
        say({**RESULT, "content": [{"type": "tool_reference", "tool_name": "g"}]}),
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
    assert parse(body)["input"]


def test_tools_of_the_provider_are_not_offered_to_the_model() -> None:
    """Hosted tools are accepted; their calls and results, and a choice of them, have no effect."""
    use = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    messages = [USER, say(use, result, TEXT, role="assistant"), USER]
    choice = {"type": "tool", "name": "web_search"}
    question = parse(talk(*messages, tools=[hosted, TOOL], tool_choice=choice))
    assert [item["role"] for item in question["input"]] == ["user", "assistant", "user"]
    assert [tool["name"] for tool in question["tools"]] == ["f"]
    assert "tool_choice" not in question
    alone = make_request(tools=[hosted], tool_choice={"type": "any"})
    assert "tools" not in parse(alone)


def test_parameters_are_converted_to_the_responses_api() -> None:
    """A model sees the parameters of the Responses API; only older versions of this API can set the sampling."""
    sampling = parse(make_request(temperature=0.5, top_k=3), "2023-06-01")
    assert (sampling["temperature"], sampling["top_k"]) == (0.5, 3)
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    members: dict[str, Any] = {
        "system": "Be kind.",
        "tools": [{**TOOL, "description": "d", "strict": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high", "format": schema},
    }
    question = parse(make_request(**members))
    del question["input"], question["stop"]
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    assert question == {
        "model": "practice",
        "truncation": "disabled",
        "instructions": "Be kind.",
        "tools": [{**function, "strict": True, "description": "d"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {**schema, "name": "answer", "strict": True}},
        "max_output_tokens": 2000,
    }


def test_thinking_may_have_only_its_binding() -> None:
    """A request may say what becomes of thinking that does not match any more, and leave the type to the model."""
    binding = {"prefix_mismatch_behavior": "drop_block"}
    for thinking in ({"block_binding": binding}, {"type": "adaptive", "block_binding": binding}):
        assert parse(make_request(thinking=thinking))["model"] == "practice"
    with pytest.raises(ApiError, match=r"thinking\.block_binding"):
        parse(make_request(thinking={}))


@for_each(
    ("path", "version", "raw", "status", "message"),
    [
        ("", None, b"{}", 400, "version: header is required"),
        ("", "1999", b"{}", 400, '"1999" is not a valid version'),
        ("", "2026-10-21", b"{", 400, "JSON"),
        ("/else", "2026-10-21", b"", 404, ""),
    ],
)
def test_http_errors_have_anthropics_format(
    server: TestServer, path: str, version: str | None, raw: bytes, status: int, message: str
) -> None:
    """Errors about the version, the route and a malformed body have Anthropic's format."""
    headers = {"content-type": "application/json"}
    headers |= {"anthropic-version": version} if version else {}
    with open_client(server, **headers) as http:
        answer = http.post(f"/v1/messages{path}", content=raw)
    kind = "invalid_request_error" if status == 400 else "not_found_error"
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert message in answer.json()["error"]["message"]
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_key_is_accepted_in_either_header() -> None:
    """The key is read from ``x-api-key`` or ``authorization``; a wrong key gets Anthropic's error format."""
    version = {"anthropic-version": "2023-06-01"}
    with serve(token="secret") as server, open_client(server) as http:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({}, 401),
        ):
            answer = http.post("/v1/messages", json=make_request(), headers=version | headers)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["type"] == "authentication_error"
        other = http.get("/v1/models", headers={"x-api-key": "secret"})
    assert other.status_code == 401  # elsewhere a key is a bearer token


def test_nested_blocks_are_flattened() -> None:
    """A search result and a document made of blocks are converted to their parts."""
    result = {"type": "search_result", "title": "T", "source": "S", "content": [TEXT]}
    document = {"type": "document", "source": {"type": "content", "content": [TEXT]}}
    (message,) = parse(talk(say(result, document)))["input"]
    assert [part["text"] for part in message["content"]] == ["T (S)", "Well", "Well"]
