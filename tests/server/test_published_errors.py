"""Every published error of the hosted API, returned by the running server over HTTP.

The rows are the two tables of observed errors: that of malformed requests is in ``test_validation.py``. The
``prepare`` function of a row creates the state that it needs: a stored response, a conversation, or a response with an
open tool call.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest

from kedge.testing import TestServer, serve
from server.test_validation import ROWS
from server.waiting import TIMEOUT

Body = dict[str, Any]

FUNCTION_TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CUSTOM_TOOL: Any = {"type": "custom", "name": "shout"}


class Api:
    """A running server and an HTTP client for it."""

    def __init__(self, server: TestServer, http: httpx.Client) -> None:
        self.server = server
        self._http = http

    def post(self, body: Any, path: str = "/v1/responses") -> httpx.Response:
        return self._http.post(path, json=body)

    def create(self, **body: Any) -> Body:
        answer = self.post({"model": "practice", "input": "Hello"} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def delete(self, path: str) -> None:
        assert self._http.delete(path).status_code == 200

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serve() as server, httpx.Client(base_url=server.url, timeout=TIMEOUT) as http:
        yield Api(server, http)


@dataclass(frozen=True)
class Row:
    """A request and its error; ``prepare`` returns values for the placeholders of both."""

    name: str
    send: Body
    message: str
    param: str | None = "input"
    code: str | None = None
    status: int = 400
    prepare: Callable[[Api], dict[str, str]] = lambda _: {}


def fill_placeholders(value: Any, values: dict[str, str]) -> Any:
    """Replace placeholders such as <id> by their values, and remove members that are ``...``."""
    if isinstance(value, str):
        for name, one in values.items():
            value = value.replace(f"<{name}>", one)
        return value
    if isinstance(value, list):
        return [fill_placeholders(one, values) for one in value]
    if isinstance(value, dict):
        return {key: fill_placeholders(one, values) for key, one in value.items() if one is not ...}
    return value


def create_deleted(api: Api) -> dict[str, str]:
    id = api.create()["id"]  # noqa: A001 - name in the API
    api.delete(f"/v1/responses/{id}")
    return {"id": id}


def create_unstored(api: Api) -> dict[str, str]:
    return {"id": api.create(store=False)["id"]}


def create_expired(api: Api) -> dict[str, str]:
    id = api.create()["id"]  # noqa: A001
    api.server.clock.advance(days=31)
    return {"id": id}


def create_call(api: Api) -> dict[str, str]:
    response = api.create(input="Please call weather.", tools=[FUNCTION_TOOL])
    call = response["output"][-1]
    assert call["type"] == "function_call"
    return {"id": response["id"], "call_id": call["call_id"]}


def create_custom_call(api: Api) -> dict[str, str]:
    response = api.create(input="Please call shout.", tools=[CUSTOM_TOOL])
    call = response["output"][-1]
    assert call["type"] == "custom_tool_call"
    return {"id": response["id"], "call_id": call["call_id"]}


def create_answered(api: Api) -> dict[str, str]:
    response = create_call(api)
    output = {"type": "function_call_output", "call_id": response["call_id"], "output": "sunny"}
    done = api.create(input=[output], previous_response_id=response["id"])
    return {"id": done["id"], "call_id": response["call_id"]}


def create_reasoning(api: Api) -> dict[str, str]:
    response = api.create(
        input="Think about 6 * 7", include=["reasoning.encrypted_content"], reasoning={}
    )
    reasoning, message = response["output"]
    assert reasoning["type"] == "reasoning"
    return {
        "id": response["id"],
        "rs": reasoning["id"],
        "msg": message["id"],
        "sealed": reasoning["encrypted_content"],
    }


def create_unstored_reasoning(api: Api) -> dict[str, str]:
    response = api.create(input="Think about 6 * 7", store=False)
    return {"rs": response["output"][0]["id"]}


def create_conversation(api: Api) -> dict[str, str]:
    answer = api.post({}, "/v1/conversations")
    return {"conv": answer.json()["id"]}


REASONING = {"type": "reasoning", "id": "<rs>", "summary": [], "encrypted_content": "<sealed>"}
ASSISTANT_MESSAGE = {"role": "assistant", "content": "It is 42."}
NOT_FOUND = "Previous response with id '<id>' not found."
CHAINED = {"input": "?", "previous_response_id": "<id>"}
ITEM_NOT_FOUND = (
    "Item with id '<rs>' not found. Items are not persisted when `store` is set to false. Try "
    "again with `store` set to true, or remove this item from your input."
)

STATE_ROWS = [
    Row(
        f"{name} previous response",
        CHAINED,
        NOT_FOUND,
        "previous_response_id",
        "previous_response_not_found",
        prepare=given,
    )
    for name, given in {
        "unknown": lambda _: {"id": "resp_x"},
        "never created": lambda _: {"id": "resp_" + "0" * 32},
        "never created, in another form": lambda _: {"id": "resp_0000000001" + "0" * 22},
        "deleted": create_deleted,
        "unstored": create_unstored,
        "expired": create_expired,
    }.items()
] + [
    Row(
        "call without output",
        CHAINED,
        "No tool output found for function call <call_id>.",
        prepare=create_call,
    ),
    Row(
        "call without output, nothing new",
        CHAINED | {"input": []},
        "No tool output found for function call <call_id>.",
        prepare=create_call,
    ),
    Row(
        "output without call",
        {"input": [{"type": "function_call_output", "call_id": "call_9", "output": "x"}]},
        "No tool call found for function call output with call_id call_9.",
    ),
    Row(
        "output of a call that was answered further up the chain",
        CHAINED
        | {"input": [{"type": "function_call_output", "call_id": "<call_id>", "output": "x"}]},
        "No tool call found for function call output with call_id <call_id>.",
        prepare=create_answered,
    ),
    Row(
        "custom output without call",
        {"input": [{"type": "custom_tool_call_output", "call_id": "call_9", "output": "x"}]},
        "No tool call found for custom tool call output with call_id call_9.",
    ),
    Row(
        "custom call without output",
        CHAINED,
        "No tool output found for custom tool call <call_id>.",
        prepare=create_custom_call,
    ),
    Row(
        "patch without output",
        {
            "input": [
                {
                    "type": "apply_patch_call",
                    "call_id": "call_1",
                    "operation": {"type": "delete_file", "path": "x"},
                    "status": "completed",
                }
            ]
        },
        "No tool output found for apply patch call call_1.",
    ),
    Row(
        "reasoning last",
        {"input": [REASONING]},
        "Item '<rs>' of type 'reasoning' was provided without its required following item.",
        prepare=create_reasoning,
    ),
    Row(
        "item lost its reasoning",
        {"input": [ASSISTANT_MESSAGE | {"id": "<msg>"}, {"role": "user", "content": "?"}]},
        "Item '<msg>' of type 'message' was provided without its required 'reasoning' item: "
        "'<rs>'.",
        prepare=create_reasoning,
    ),
    Row(
        "duplicate ids",
        {"input": [REASONING, REASONING, ASSISTANT_MESSAGE]},
        "Duplicate item found with id <rs>. Remove duplicate items from your input and try again.",
        prepare=create_reasoning,
    ),
    Row(
        "history replayed and chained",
        CHAINED | {"input": [REASONING, ASSISTANT_MESSAGE | {"id": "<msg>"}]},
        "Duplicate item found with id <rs>. Remove duplicate items from your input and try again.",
        prepare=create_reasoning,
    ),
    Row(
        "unknown reasoning item",
        {"input": [{"type": "reasoning", "id": "<rs>", "summary": []}, ASSISTANT_MESSAGE]},
        ITEM_NOT_FOUND,
        status=404,
        prepare=create_unstored_reasoning,
    ),
    Row(
        "unknown item reference",
        {"input": [{"type": "item_reference", "id": "<rs>"}]},
        ITEM_NOT_FOUND,
        status=404,
        prepare=create_unstored_reasoning,
    ),
    Row(
        "bad encrypted reasoning",
        {"input": [REASONING | {"id": "rs_1", "encrypted_content": "gAAAAABx"}, ASSISTANT_MESSAGE]},
        "The encrypted content gAAA... could not be verified. Reason: Encrypted content could not "
        "be decrypted or parsed.",
        None,
        "invalid_encrypted_content",
    ),
    Row(
        "both conversation and previous response",
        {"conversation": "conv_x", "previous_response_id": "resp_x"},
        "Mutually exclusive parameters: ''. Ensure you are only providing one of: 'pre..._id' or "
        "'conversation'.",
        None,
        "mutually_exclusive_parameters",
    ),
    Row(
        "unknown conversation",
        {"conversation": "conv_x"},
        "Conversation with id 'conv_x' not found.",
        None,
        None,
        404,
    ),
    Row(
        "no model at all",
        {"model": ""},
        "The requested model '' does not exist.",
        "model",
        "model_not_found",
    ),
    Row(
        "required tools that are not there",
        {"tool_choice": "required", "tools": []},
        "Tool choice 'required' must be specified with 'tools' parameter.",
        "tool_choice",
        None,
    ),
    Row(
        "a function that is not offered",
        {"tool_choice": {"type": "function", "name": "other"}, "tools": [FUNCTION_TOOL]},
        "Tool choice 'other' not found in 'tools' parameter.",
        "tool_choice",
        None,
    ),
    Row(
        "unknown prompt",
        {"prompt": {"id": "pmpt_x"}},
        "Prompt with id 'pmpt_x' not found.",
        None,
        None,
        404,
    ),
    Row(
        "input absent with a previous response",
        {"input": ..., "previous_response_id": "<id>"},
        "Missing required parameter: 'input'.",
        "input",
        "missing_required_parameter",
        prepare=lambda api: {"id": api.create()["id"]},
    ),
    *(
        Row(
            f"input {empty!r} and nothing before",
            {"input": empty},
            "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation' must be "
            "provided.",
            None,
            "missing_required_parameter",
        )
        for empty in ([], "")
    ),
    Row(
        "empty input and an unknown previous response",
        {"input": [], "previous_response_id": "resp_x"},
        "Previous response with id 'resp_x' not found.",
        "previous_response_id",
        "previous_response_not_found",
    ),
]

SHAPE_ROWS = [Row(name, send, message, param, code) for name, send, param, code, message in ROWS]
STATUS_OF_REASONING = Row(
    "status on a reasoning item",
    {"input": [*([{"role": "user", "content": "x"}] * 3), REASONING | {"status": "completed"}]},
    "Unknown parameter: 'input[3].status'.",
    "input[3].status",
    "unknown_parameter",
    prepare=create_reasoning,
)


def check_error(answer: httpx.Response, row: Row, values: dict[str, str]) -> None:
    assert answer.status_code == row.status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "error": {
            "message": fill_placeholders(row.message, values),
            "type": "invalid_request_error",
            "param": row.param,
            "code": row.code,
        }
    }


@pytest.mark.parametrize("row", [*STATE_ROWS, STATUS_OF_REASONING], ids=lambda row: row.name)
def test_server_returns_the_published_error(api: Api, row: Row) -> None:
    """Status, message, type, param and code are as published, as JSON even for a stream."""
    check_row(api, row)


def test_malformed_request_gets_the_published_error(api: Api) -> None:
    """The same for every error of a malformed request."""
    for row in SHAPE_ROWS:
        check_row(api, row)


def check_row(api: Api, row: Row) -> None:
    for stream in ({}, {"stream": True}):
        values = row.prepare(api)
        body = fill_placeholders({"model": "practice", "input": "Hello"} | row.send, values)
        if not any(name.startswith("st") for name in body):  # a key that is sent is not suggested
            body = stream | body
        check_error(api.post(body), row, values)


def test_rejected_request_changes_nothing(api: Api) -> None:
    """After rejected requests, the previous response can still be continued."""
    first = api.create(input="My name is Ada.")
    for row in SHAPE_ROWS:
        api.post(fill_placeholders({"model": "practice", "input": "x"} | row.send, {}))
    second = api.create(input="What did I say first?", previous_response_id=first["id"])
    assert "My name is Ada." in second["output"][0]["content"][0]["text"]


def test_empty_input_after_a_valid_response_is_accepted(api: Api) -> None:
    """Empty input is accepted with a previous response, because the state is checked first."""
    first = api.create()
    assert api.create(input=[], previous_response_id=first["id"])["status"] == "completed"


@pytest.mark.parametrize("send", [{"previous_response_id": "resp_x"}, {"conversation": "conv_x"}])
def test_the_schema_is_checked_before_the_state(api: Api, send: Body) -> None:
    """An invalid value is reported before an unknown id."""
    answer = api.post({"model": "practice", "input": "x", "truncation": "bogus", **send})
    assert answer.json()["error"]["param"] == "truncation"


def test_order_of_state_checks(api: Api) -> None:
    """The conversation is checked before the prompt, and the prompt before the previous response."""
    unknown = {"model": "m", "input": "x", "prompt": {"id": "pmpt_x"}}
    both = api.post({**unknown, "conversation": "conv_x"})
    assert both.json()["error"]["message"] == "Conversation with id 'conv_x' not found."
    both = api.post({**unknown, "previous_response_id": "resp_x"})
    assert both.json()["error"]["message"] == "Prompt with id 'pmpt_x' not found."


def test_lone_surrogates_are_rejected(api: Api) -> None:
    """Escaped lone surrogates are valid JSON, but they are rejected with a readable error."""
    for raw, param in [
        (b'{"model": "practice", "input": "\\ud800"}', "input"),
        (b'{"model": "practice", "input": "x", "\\ud800": 1}', "\\ud800"),
    ]:
        answer = httpx.post(
            f"{api.server.base_url}/responses",
            timeout=TIMEOUT,
            content=raw,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400, answer.text
        assert json.loads(answer.content)["error"]["param"] == param
