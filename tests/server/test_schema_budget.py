"""A schema that requires too much work, or too large a value, is rejected by every endpoint."""

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from kedge.testing import serve
from server.waiting import TIMEOUT

REFERENCES: Any = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/d0"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {
        **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(20)},
        "d20": {"type": "string"},
    },
}
LARGE_VALUE: Any = {
    "type": "object",
    "properties": {
        "a": {
            "type": "array",
            "minItems": 1_000,
            "items": {"type": "string", "minLength": 10_000},
        }
    },
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = {"steps": REFERENCES, "bytes": LARGE_VALUE}


def build_responses(schema: Any, in_tool: bool) -> tuple[str, dict[str, Any]]:
    settings: dict[str, Any] = (
        {
            "tools": [{"type": "function", "name": "t", "parameters": schema}],
            "tool_choice": "required",
        }
        if in_tool
        else {"text": {"format": {"type": "json_schema", "name": "f", "schema": schema}}}
    )
    return "/v1/responses", {"model": "practice", "input": "Hello"} | settings


def build_chat(schema: Any, in_tool: bool) -> tuple[str, dict[str, Any]]:
    function = {"name": "t", "parameters": schema}
    json_schema = {"name": "f", "schema": schema}
    settings: dict[str, Any] = (
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        if in_tool
        else {"response_format": {"type": "json_schema", "json_schema": json_schema}}
    )
    messages = [{"role": "user", "content": "Hello"}]
    return "/v1/chat/completions", {"model": "practice", "messages": messages} | settings


def build_messages(schema: Any, in_tool: bool) -> tuple[str, dict[str, Any]]:
    settings: dict[str, Any] = (
        {"tools": [{"name": "t", "input_schema": schema}], "tool_choice": {"type": "any"}}
        if in_tool
        else {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    )
    messages = [{"role": "user", "content": "Hello"}]
    return "/v1/messages", {"model": "practice", "max_tokens": 99, "messages": messages} | settings


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """Return a client of a running server."""
    headers = {"anthropic-version": "2023-06-01"}
    with (
        serve() as server,
        httpx.Client(
            base_url=server.url.removesuffix("/v1"), headers=headers, timeout=TIMEOUT
        ) as client,
    ):
        yield client


@pytest.mark.parametrize("build", [build_responses, build_chat, build_messages])
@pytest.mark.parametrize("in_tool", [True, False], ids=["tool", "format"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("unit", SCHEMAS)
def test_a_schema_beyond_the_budget_is_an_error_of_the_request(
    http: httpx.Client, build: Any, in_tool: bool, stream: bool, unit: str
) -> None:
    """Each endpoint answers 400 and names the limit, also if the answer would be streamed."""
    path, body = build(SCHEMAS[unit], in_tool)
    answer = http.post(path, json=body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f",000 {unit}. Simplify the schema" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "schema_too_complex"


def test_a_background_response_fails_with_the_same_error(http: httpx.Client) -> None:
    """A streamed background response ends as failed, with the code of the error."""
    path, body = build_responses(REFERENCES, in_tool=True)
    answer = http.post(path, json=body | {"background": True, "stream": True})
    assert answer.status_code == 200
    assert "response.failed" in answer.text
    assert "takes more than 10,000 steps" in answer.text
