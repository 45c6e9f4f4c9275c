"""Validation of chat completion requests and its error messages."""

from typing import Any

import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.routes.chat_requests import parse_request

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


ASSISTANT = {"role": "assistant", "content": None}
INVALID_MESSAGES: list[tuple[list[Any], str, str]] = [
    ([], "messages", "empty array"),
    ([{"content": "x"}], "messages[0].role", "Missing required parameter"),
    ([{**USER, "mood": "x"}], "messages[0].mood", "Unknown parameter"),
    ([{**USER, "content": None}], "messages[0].content", "but got null"),
    (
        [{**USER, "content": [{"type": "input_text", "text": "x"}]}],
        "messages[0].content[0].type",
        "Supported values are: 'text', 'image_url', 'input_audio', and 'file'.",
    ),
    ([USER, RESULT_MESSAGE], "messages.[1].role", "must be a response to a preceeding"),
    ([USER, CALL_MESSAGE, USER], "messages.[2].role", "did not have response messages: call_1"),
    (
        [USER, CALL_MESSAGE, {**RESULT_MESSAGE, "tool_call_id": "call_2"}],
        "messages.[2].tool_call_id",
        "'tool_call_id' of 'call_2' not found",
    ),
    ([USER, {**CALL_MESSAGE, "tool_calls": []}], "messages[1].tool_calls", "empty array"),
    ([USER, ASSISTANT], "messages.[1].content", "expected a string, got null"),
    (
        [USER, {**ASSISTANT, "content": "x", "function_call": {}}],
        "messages.[1].function_call",
        "does not support 'function_call'",
    ),
]
ONLY_TOOLS = "only allowed when 'tools' are specified"
OTHER_CHOICE = {"type": "function", "function": {"name": "g"}}
OPEN_SCHEMA: dict[str, Any] = {"name": "s", "schema": {"type": "object"}, "strict": True}
INVALID_MEMBERS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": ...}, "model", "Missing required parameter: 'model'."),
    ({"model": ""}, "model", "does not exist"),
    ({"messages": "Hello"}, "messages", "expected an array of objects"),
    ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
    ({"temperature": 3}, "temperature", "decimal above maximum value"),
    ({"n": 2}, "n", "one choice"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "array too long"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when 'stream'"),
    ({"tool_choice": "auto"}, "tool_choice", ONLY_TOOLS),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", ONLY_TOOLS),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", "Missing required"),
    (
        {"tools": [TOOL], "tool_choice": OTHER_CHOICE},
        "tool_choice",
        "Tool choice 'g' not found in 'tools' parameter.",
    ),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "at the same time"),
    ({"response_format": {"type": "json_object"}}, "messages", "must contain the word 'json'"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        "tools[0].function.parameters",
        "Invalid schema for function 'f': schema must be a JSON Schema of 'type:",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": OPEN_SCHEMA}},
        "response_format",
        "Invalid schema for response_format 's': In context=(), 'additionalProperties' is required",
    ),
]
INVALID_REQUESTS = [
    *INVALID_MEMBERS,
    *(({"messages": messages}, *error) for messages, *error in INVALID_MESSAGES),
]


@for_each(("members", "param", "message"), INVALID_REQUESTS)
def test_invalid_request_is_rejected(
    members: dict[str, Any], param: str | None, message: str
) -> None:
    """An invalid request is rejected with the API's message and the invalid parameter."""
    body = {name: value for name, value in make_request(**members).items() if value is not ...}
    with pytest.raises(ApiError) as exc_info:
        parse_request(body)
    assert (exc_info.value.status, exc_info.value.param) == (400, param)
    assert message in exc_info.value.message


ALLOWED = {"mode": "auto", "tools": [TOOL]}
SCHEMA: dict[str, Any] = {"name": "s", "schema": {}}
VALID_REQUESTS: list[dict[str, Any]] = [
    talk(USER, USER, {"role": "assistant", "content": "x"}),
    talk(USER, CALL_MESSAGE, RESULT_MESSAGE),
    talk({**USER, "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, stop=["a"]),
    make_request(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": ALLOWED}),
    make_request(response_format={"type": "json_schema", "json_schema": SCHEMA}),
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
    closed = {"type": "object", "additionalProperties": False}
    schema = {"name": "s", "schema": closed, "strict": True}
    question = parse_request(
        make_request(
            tools=[{"type": "function", "function": {"name": "f", "parameters": closed}}],
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
        "tools": [{"type": "function", "name": "f", "parameters": closed, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "high"},
        "truncation": "disabled",
        "stop": ("END",),
    }
