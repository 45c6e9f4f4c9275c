"""Validation of chat completion requests and its error messages."""

import json
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.routes.chat_requests import parse_request
from kedge.testing import TestServer
from server.waiting import TIMEOUT

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL_MESSAGE = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT_MESSAGE = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
TOOL = {"type": "function", "function": {"name": "f"}}


def make_request(**members: Any) -> dict[str, Any]:
    return {"model": "practice", "messages": [USER], **members}


def talk(*messages: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return a request with these messages."""
    return make_request(messages=list(messages), **members)


INVALID_REQUESTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": [USER]}, "model", "Missing required parameter: 'model'."),
    ({"model": "practice"}, "messages", "Missing required parameter: 'messages'."),
    (make_request(model=""), "model", "does not exist"),
    (make_request(model=5), "model", "expected a string, but got an integer"),
    (talk(), "messages", "empty array"),
    (make_request(messages="Hello"), "messages", "expected an array of objects"),
    (talk({"content": "x"}), "messages[0].role", "Missing required parameter"),
    (
        talk({"role": "user"}),
        "messages[0].content",
        "Missing required parameter",
    ),
    (talk({**USER, "mood": "x"}), "messages[0].mood", "Unknown parameter"),
    (talk({**USER, "content": None}), "messages[0].content", "but got null"),
    (
        talk({**USER, "content": [{"type": "input_text", "text": "x"}]}),
        "messages[0].content[0].type",
        "Supported values are: 'text', 'image_url', 'input_audio', and 'file'.",
    ),
    (
        talk({"role": "system", "content": [{"type": "image_url"}]}),
        "messages[0].content[0].type",
        "Supported values are: 'text'.",
    ),
    (
        talk(USER, RESULT_MESSAGE),
        "messages.[1].role",
        "must be a response to a preceeding",
    ),
    (
        talk(USER, CALL_MESSAGE, USER),
        "messages.[2].role",
        "did not have response messages: call_1",
    ),
    (
        talk(USER, CALL_MESSAGE),
        "messages.[2].role",
        "did not have response messages",
    ),
    (
        talk(USER, CALL_MESSAGE, {**RESULT_MESSAGE, "tool_call_id": "call_2"}),
        "messages.[2].tool_call_id",
        "'tool_call_id' of 'call_2' not found",
    ),
    (
        talk(USER, CALL_MESSAGE, RESULT_MESSAGE, USER, RESULT_MESSAGE),
        "messages.[4].role",
        "must be a response",
    ),
    (
        talk(USER, {**CALL_MESSAGE, "tool_calls": []}),
        "messages[1].tool_calls",
        "empty array",
    ),
    (
        talk(USER, {"role": "assistant", "content": None}),
        "messages.[1].content",
        "expected a string, got null",
    ),
    (talk(USER, input="x"), "input", "Unknown parameter: 'input'."),
    (make_request(temprature=1), "temprature", "Did you mean 'temperature'?"),
    (make_request(temperature=3), "temperature", "decimal above maximum value"),
    (make_request(n=2), "n", "one choice"),
    (make_request(modalities=["text", "audio"]), "modalities", "text only"),
    (make_request(stop=["a", "b", "c", "d", "e"]), "stop", "array too long"),
    (
        make_request(stream_options={"include_usage": True}),
        "stream_options",
        "only allowed when 'stream'",
    ),
    (make_request(tool_choice="auto"), "tool_choice", "only allowed when 'tools' are specified"),
    (make_request(parallel_tool_calls=False), "parallel_tool_calls", "only allowed when 'tools'"),
    (make_request(tools=[{"type": "function"}]), "tools[0].function", "Missing required parameter"),
    (
        make_request(tools=[{"type": "function", "name": "f"}]),
        "tools[0].function",
        "Missing required",
    ),
    (
        make_request(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "Tool choice 'g' not found in 'tools' parameter.",
    ),
    (make_request(max_tokens=5, max_completion_tokens=5), "max_tokens", "at the same time"),
    (
        make_request(response_format={"type": "json_object"}),
        "messages",
        "must contain the word 'json'",
    ),
    (
        make_request(response_format={"type": "json_schema"}),
        "response_format.json_schema",
        "Missing required parameter",
    ),
    (make_request(functions=[]), "functions", "Unknown parameter"),
    (
        talk(USER, {"role": "assistant", "content": "x", "function_call": {}}),
        "messages.[1].function_call",
        "does not support 'function_call'",
    ),
]


@for_each(("body", "param", "message"), INVALID_REQUESTS)
def test_invalid_request_is_rejected(body: dict[str, Any], param: str | None, message: str) -> None:
    """An invalid request is rejected with the API's message and the invalid parameter."""
    with pytest.raises(ApiError) as exc_info:
        parse_request(body)
    assert exc_info.value.status == 400
    assert exc_info.value.param == param
    assert message in exc_info.value.message


VALID_REQUESTS: list[dict[str, Any]] = [
    make_request(),
    talk(USER, CALL_MESSAGE, RESULT_MESSAGE),
    talk(USER, USER, {"role": "assistant", "content": "x"}),
    talk(
        USER,
        {**CALL_MESSAGE, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
        RESULT_MESSAGE,
        {**RESULT_MESSAGE, "tool_call_id": "c2"},
    ),
    talk({"role": "developer", "content": [{"type": "text", "text": "x"}]}, USER),
    make_request(tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
    make_request(stop=None, temperature=None, max_tokens=None, response_format={"type": "text"}),
    talk({**USER, "content": "as JSON"}, response_format={"type": "json_object"}),
    make_request(stream=True, stream_options={"include_usage": True}),
    make_request(seed=1, user="u", metadata={"a": "b"}, logit_bias={"1": 5}, store=False),
]


@for_each("body", VALID_REQUESTS)
def test_valid_request_is_accepted(body: dict[str, Any]) -> None:
    """Requests that the API accepts are accepted."""
    assert parse_request(body)["input"]


def test_parameters_are_converted_to_the_responses_api() -> None:
    """Parameters are converted to those of the Responses API, so that a model sees one format."""
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    question = parse_request(
        make_request(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            tool_choice={"type": "function", "function": {"name": "f"}},
            max_completion_tokens=7,
            reasoning_effort="low",
            verbosity="high",
            response_format={"type": "json_schema", "json_schema": schema},
            stop="END",
            temperature=0.5,
        )
    )
    del question["input"]
    assert question == {
        "model": "practice",
        "temperature": 0.5,
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "high"},
        "truncation": "disabled",
        "stop": ("END",),
    }


def test_errors_have_openais_format(server: TestServer) -> None:
    """An error has OpenAI's four members, and a request id in the headers."""
    answer = httpx2.post(
        f"{server.base_url}/chat/completions", json={"model": "x"}, timeout=TIMEOUT
    )
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Missing required parameter: 'messages'.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "missing_required_parameter",
    }
    assert answer.headers["x-request-id"].startswith("req_")
    assert "request-id" not in json.dumps(answer.json())
