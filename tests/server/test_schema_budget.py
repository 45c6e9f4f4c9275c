"""A schema that requires too much work, or too large a value, is rejected by every endpoint."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.testing import serve
from server.conftest import open_client

LEVELS: Any = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 4} for n in range(20)}
LONG_TEXTS = {"type": "array", "minItems": 1_000, "items": {"const": "x" * 10_000}}


def make_schema(member: Any, **more: Any) -> Any:
    """Return a schema of an object with one member."""
    strict = {"required": ["a"], "additionalProperties": False}
    return {"type": "object", "properties": {"a": member}, **strict, **more}


REFERENCES = make_schema({"$ref": "#/$defs/d0"}, **{"$defs": LEVELS | {"d20": {"type": "string"}}})
SCHEMAS = {"steps": REFERENCES, "bytes": make_schema(LONG_TEXTS)}


def build_responses(schema: Any, in_tool: bool) -> dict[str, Any]:
    tool = {"type": "function", "name": "t", "parameters": schema}
    form = {"type": "json_schema", "name": "f", "schema": schema}
    required = {"tools": [tool], "tool_choice": "required"}
    return {"input": "Hello"} | (required if in_tool else {"text": {"format": form}})


def build_chat(schema: Any, in_tool: bool) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "t", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    required = {"tools": [tool], "tool_choice": "required"}
    return {"messages": HELLO} | (required if in_tool else {"response_format": form})


def build_messages(schema: Any, in_tool: bool) -> dict[str, Any]:
    required = {"tools": [{"name": "t", "input_schema": schema}], "tool_choice": {"type": "any"}}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"max_tokens": 99, "messages": HELLO} | (required if in_tool else form)


HELLO = [{"role": "user", "content": "Hello"}]
APIS: dict[str, Any] = {
    "/v1/responses": build_responses,
    "/v1/chat/completions": build_chat,
    "/v1/messages": build_messages,
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    """Yield a client of a running server."""
    version = {"anthropic-version": "2023-06-01"}
    with serve() as server, open_client(server, **version) as client:
        yield client


@for_each("path", APIS)
@for_each("in_tool", [True, False])
@for_each("stream", [True, False])
@for_each("unit", SCHEMAS)
def test_a_schema_beyond_the_budget_is_an_error_of_the_request(
    http: httpx2.Client, path: str, in_tool: bool, stream: bool, unit: str
) -> None:
    """Each endpoint answers 400 and names the limit, also if the answer would be streamed."""
    body = {"model": "practice", "stream": stream, **APIS[path](SCHEMAS[unit], in_tool)}
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f",000 {unit}. Simplify the schema" in error["message"]
    assert path == "/v1/messages" or error["code"] == "schema_too_complex"


def test_a_background_response_fails_with_the_same_error(http: httpx2.Client) -> None:
    """A streamed background response ends as failed, with the code of the error."""
    options = {"model": "practice", "background": True, "stream": True}
    body = options | build_responses(REFERENCES, in_tool=True)
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert "response.failed" in answer.text
    assert "takes more than 10,000 steps" in answer.text
