"""What a chat request may not be, and in which words that is said."""

import json
from typing import Any

import httpx2
import pytest

from kedge.server.completions.reading import read
from kedge.server.errors import ApiError
from kedge.testing import TestServer

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
TOOL = {"type": "function", "function": {"name": "f"}}


def asked(**members: Any) -> dict[str, Any]:
    return {"model": "practice", "messages": [USER], **members}


WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": [USER]}, "model", "Missing required parameter: 'model'."),
    ({"model": "practice"}, "messages", "Missing required parameter: 'messages'."),
    (asked(model=""), "model", "does not exist"),
    (asked(model=5), "model", "expected a string, but got an integer"),
    (asked(messages=[]), "messages", "empty array"),
    (asked(messages="Hello"), "messages", "expected an array of objects"),
    (asked(messages=[{"content": "x"}]), "messages[0].role", "Missing required parameter"),
    (asked(messages=[{"role": "user"}]), "messages[0].content", "Missing required parameter"),
    (asked(messages=[{**USER, "mood": "x"}]), "messages[0].mood", "Unknown parameter"),
    (asked(messages=[{**USER, "content": None}]), "messages[0].content", "but got null"),
    (
        asked(messages=[{**USER, "content": [{"type": "input_text", "text": "x"}]}]),
        "messages[0].content[0].type",
        "Supported values are: 'text', 'image_url', 'input_audio', and 'file'.",
    ),
    (
        asked(messages=[{"role": "system", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0].type",
        "Supported values are: 'text'.",
    ),
    (asked(messages=[USER, RESULT]), "messages.[1].role", "must be a response to a preceeding"),
    (
        asked(messages=[USER, CALLING, USER]),
        "messages.[2].role",
        "did not have response messages: call_1",
    ),
    (asked(messages=[USER, CALLING]), "messages.[2].role", "did not have response messages"),
    (
        asked(messages=[USER, CALLING, {**RESULT, "tool_call_id": "call_2"}]),
        "messages.[2].tool_call_id",
        "'tool_call_id' of 'call_2' not found",
    ),
    (
        asked(messages=[USER, CALLING, RESULT, USER, RESULT]),
        "messages.[4].role",
        "must be a response",
    ),
    (
        asked(messages=[USER, {**CALLING, "tool_calls": []}]),
        "messages[1].tool_calls",
        "empty array",
    ),
    (
        asked(messages=[USER, {"role": "assistant", "content": None}]),
        "messages.[1].content",
        "expected a string, got null",
    ),
    (asked(messages=[USER], input="x"), "input", "Unknown parameter: 'input'."),
    (asked(temprature=1), "temprature", "Did you mean 'temperature'?"),
    (asked(temperature=3), "temperature", "decimal above maximum value"),
    (asked(n=2), "n", "one choice"),
    (asked(modalities=["text", "audio"]), "modalities", "text only"),
    (asked(stop=["a", "b", "c", "d", "e"]), "stop", "array too long"),
    (asked(stream_options={"include_usage": True}), "stream_options", "only allowed when 'stream'"),
    (asked(tool_choice="auto"), "tool_choice", "only allowed when 'tools' are specified"),
    (asked(parallel_tool_calls=False), "parallel_tool_calls", "only allowed when 'tools'"),
    (asked(tools=[{"type": "function"}]), "tools[0].function", "Missing required parameter"),
    (asked(tools=[{"type": "function", "name": "f"}]), "tools[0].function", "Missing required"),
    (
        asked(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "Tool choice 'g' not found in 'tools' parameter.",
    ),
    (asked(max_tokens=5, max_completion_tokens=5), "max_tokens", "at the same time"),
    (asked(response_format={"type": "json_object"}), "messages", "must contain the word 'json'"),
    (
        asked(response_format={"type": "json_schema"}),
        "response_format.json_schema",
        "Missing required parameter",
    ),
    (asked(functions=[]), "functions", "Unknown parameter"),
    (
        asked(messages=[USER, {"role": "assistant", "content": "x", "function_call": {}}]),
        "messages.[1].function_call",
        "only as 'tool_calls'",
    ),
]


@pytest.mark.parametrize(("body", "param", "words"), WRONG)
def test_a_wrong_request_is_refused_at_its_place(
    body: dict[str, Any], param: str | None, words: str
) -> None:
    """With the parameter that is to blame, in the words of the API."""
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message


RIGHT: list[dict[str, Any]] = [
    asked(),
    asked(messages=[USER, CALLING, RESULT]),
    asked(messages=[USER, USER, {"role": "assistant", "content": "x"}]),
    asked(
        messages=[
            USER,
            {**CALLING, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
            RESULT,
            {**RESULT, "tool_call_id": "c2"},
        ]
    ),
    asked(messages=[{"role": "developer", "content": [{"type": "text", "text": "x"}]}, USER]),
    asked(tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
    asked(stop=None, temperature=None, max_tokens=None, response_format={"type": "text"}),
    asked(messages=[{**USER, "content": "as JSON"}], response_format={"type": "json_object"}),
    asked(stream=True, stream_options={"include_usage": True}),
    asked(seed=1, user="u", metadata={"a": "b"}, logit_bias={"1": 5}, store=False),
]


@pytest.mark.parametrize("body", RIGHT)
def test_a_right_request_is_taken(body: dict[str, Any]) -> None:
    """Strict, but no stricter than the API."""
    assert read(body).input


def test_parameters_get_the_names_of_the_responses_api() -> None:
    """A model behind the server need not know which endpoint was asked."""
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    question = read(
        asked(
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
    assert question.stop == ("END",)
    assert question.body == {
        "model": "practice",
        "temperature": 0.5,
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "high"},
        "truncation": "disabled",
    }


def test_errors_reach_the_client_in_openais_shape(server: TestServer) -> None:
    """Four members, and a request id in the headers."""
    answer = httpx2.post(f"{server.base_url}/chat/completions", json={"model": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Missing required parameter: 'messages'.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "missing_required_parameter",
    }
    assert answer.headers["x-request-id"].startswith("req_")
    assert "request-id" not in json.dumps(answer.json())
