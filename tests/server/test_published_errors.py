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

from for_each import for_each
from kedge.testing import TestServer, serve
from server.conftest import WEATHER, open_client
from server.test_validation import ROWS, USER, make_body

Body = dict[str, Any]

CUSTOM_TOOL = {"type": "custom", "name": "shout"}


class Api:
    """A running server and an HTTP client for it."""

    def __init__(self, server: TestServer, http: httpx.Client) -> None:
        self.server = server
        self.http = http

    def post(self, body: Any) -> httpx.Response:
        return self.http.post("/v1/responses", json=body)

    def create(self, **body: Any) -> Body:
        answer = self.post({"model": "practice", "input": "Hello"} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serve() as server, open_client(server) as http:
        yield Api(server, http)


@dataclass(frozen=True)
class Row:
    """A request and its error; ``prepare`` returns values for the placeholders of both."""

    send: Body
    message: str
    prepare: Callable[[Api], dict[str, str]] = lambda _: {}
    param: str | None = "input"
    code: str | None = None
    status: int = 400


def fill_placeholders(value: Any, values: dict[str, str]) -> Any:
    """Replace placeholders such as <id> by their values."""
    text = json.dumps(value)
    for name, one in values.items():
        text = text.replace(f"<{name}>", one)
    return json.loads(text)


def create_response(api: Api, **body: Any) -> dict[str, str]:
    return {"id": api.create(**body)["id"]}


def create_deleted(api: Api) -> dict[str, str]:
    created = create_response(api)
    assert api.http.delete(f"/v1/responses/{created['id']}").status_code == 200
    return created


def create_expired(api: Api) -> dict[str, str]:
    created = create_response(api)
    api.server.clock.advance(days=31)
    return created


def create_call(api: Api, tool: Body = WEATHER) -> dict[str, str]:
    response = api.create(input=f"Please call {tool['name']}.", tools=[tool])
    return {"id": response["id"], "call_id": response["output"][-1]["call_id"]}


def create_answered(api: Api) -> dict[str, str]:
    call = create_call(api)
    body = fill_placeholders(CHAINED | make_output("<call_id>"), call)
    return {"id": api.create(**body)["id"], "call_id": call["call_id"]}


def create_reasoning(api: Api) -> dict[str, str]:
    response = api.create(
        input="Think about 6 * 7", include=["reasoning.encrypted_content"], reasoning={}
    )
    reasoning, message = response["output"]
    ids = {"id": response["id"], "rs": reasoning["id"], "msg": message["id"]}
    return ids | {"sealed": reasoning["encrypted_content"]}


def create_unstored_reasoning(api: Api) -> dict[str, str]:
    response = api.create(input="Think about 6 * 7", store=False)
    return {"rs": response["output"][0]["id"]}


def make_output(call_id: str, kind: str = "function") -> Body:
    kind = "function_call_output" if kind == "function" else "custom_tool_call_output"
    return {"input": [{"type": kind, "call_id": call_id, "output": "x"}]}


REASONING = {"type": "reasoning", "id": "<rs>", "summary": [], "encrypted_content": "<sealed>"}
FALSE_REASONING = REASONING | {"id": "rs_1", "encrypted_content": "gAAAAABx"}
MESSAGE = {"role": "assistant", "content": "It is 42."}
PATCH = {
    "type": "apply_patch_call",
    "call_id": "call_1",
    "operation": {"type": "delete_file", "path": "x"},
    "status": "completed",
}
CHAINED = {"input": "?", "previous_response_id": "<id>"}
NO_OUTPUT = "No tool output found for {} call <call_id>."
NO_CALL = "No tool call found for {} call output with call_id {}."
NOT_FOUND = "Previous response with id '{}' not found."
UNKNOWN_ID = ("previous_response_id", "previous_response_not_found")
DUPLICATE = (
    "Duplicate item found with id <rs>. Remove duplicate items from your input and try again."
)
LOST_REASONING = (
    "Item '<msg>' of type 'message' was provided without its required 'reasoning' item: '<rs>'."
)
ITEM_NOT_FOUND = (
    "Item with id '<rs>' not found. Items are not persisted when `store` is set to false. Try "
    "again with `store` set to true, or remove this item from your input."
)
NO_INPUT = (
    "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation' must be provided."
)


STATE_ROWS = [
    *(
        Row(CHAINED | more, NOT_FOUND.format("<id>"), given, *UNKNOWN_ID)
        for more in ({}, {"input": []})
        for given in (
            lambda _: {"id": "resp_x"},
            lambda _: {"id": "resp_" + "0" * 32},
            lambda _: {"id": "resp_0000000001" + "0" * 22},
            create_deleted,
            lambda api: create_response(api, store=False),
            create_expired,
        )
    ),
    Row(CHAINED, NO_OUTPUT.format("function"), create_call),
    Row(CHAINED | {"input": []}, NO_OUTPUT.format("function"), create_call),
    Row(CHAINED, NO_OUTPUT.format("custom tool"), lambda api: create_call(api, CUSTOM_TOOL)),
    Row({"input": [PATCH]}, "No tool output found for apply patch call call_1."),
    Row(make_output("call_9"), NO_CALL.format("function", "call_9")),
    Row(make_output("call_9", "custom"), NO_CALL.format("custom tool", "call_9")),
    # The call was answered further up the chain.
    Row(
        CHAINED | make_output("<call_id>"),
        NO_CALL.format("function", "<call_id>"),
        create_answered,
    ),
    Row(
        {"input": [REASONING]},
        "Item '<rs>' of type 'reasoning' was provided without its required following item.",
        create_reasoning,
    ),
    Row({"input": [MESSAGE | {"id": "<msg>"}, USER]}, LOST_REASONING, create_reasoning),
    Row({"input": [REASONING, REASONING, MESSAGE]}, DUPLICATE, create_reasoning),
    Row(CHAINED | {"input": [REASONING, MESSAGE | {"id": "<msg>"}]}, DUPLICATE, create_reasoning),
    *(
        Row({"input": items}, ITEM_NOT_FOUND, create_unstored_reasoning, status=404)
        for items in (
            [{"type": "reasoning", "id": "<rs>", "summary": []}, MESSAGE],
            [{"type": "item_reference", "id": "<rs>"}],
        )
    ),
    Row(
        {"input": [FALSE_REASONING, MESSAGE]},
        "The encrypted content gAAA... could not be verified. Reason: Encrypted content could not "
        "be decrypted or parsed.",
        param=None,
        code="invalid_encrypted_content",
    ),
    Row(
        {"conversation": "conv_x", "previous_response_id": "resp_x"},
        "Mutually exclusive parameters: ''. Ensure you are only providing one of: 'pre..._id' or "
        "'conversation'.",
        param=None,
        code="mutually_exclusive_parameters",
    ),
    *(
        Row({kind: id_}, f"{kind.title()} with id '{name}' not found.", param=None, status=404)
        for kind, name, id_ in (
            ("conversation", "conv_x", "conv_x"),
            ("prompt", "pmpt_x", {"id": "pmpt_x"}),
        )
    ),
    Row(
        {"model": ""},
        "The requested model '' does not exist.",
        param="model",
        code="model_not_found",
    ),
    Row(
        {"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]},
        "Tool choice 'other' not found in 'tools' parameter.",
        param="tool_choice",
    ),
    Row(
        {"input": "absent", "previous_response_id": "<id>"},
        "Missing required parameter: 'input'.",
        create_response,
        code="missing_required_parameter",
    ),
    *(
        Row({"input": empty}, NO_INPUT, param=None, code="missing_required_parameter")
        for empty in ([], "")
    ),
]


def make_function(parameters: Body, strict: bool | None = None) -> Body:
    tool = {"type": "function", "name": "f", "parameters": parameters, "strict": strict}
    return {"tools": [tool]}


def make_format(schema: Body) -> Body:
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    return {"text": {"format": text_format}}


def make_strict(properties: Body, **members: Any) -> Body:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **members,
    }


JSON_OBJECT = {"text": {"format": {"type": "json_object"}}}
NUMBER = {"type": "number"}
NOT_OBJECT = "schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{}\"'."
OPEN = "In context={}, 'additionalProperties' is required to be supplied and to be false."
OPTIONAL = (
    "In context={}, 'required' is required to be supplied and to be an array including every key in "
    "properties. Missing '{}'."
)
FUNCTION_PROBLEMS: list[tuple[Body, bool | None, str]] = [
    ({}, None, NOT_OBJECT.format("None")),
    ({"type": "array", "items": NUMBER}, False, NOT_OBJECT.format("array")),
    ({"type": "object"}, True, OPEN.format("()")),
    (make_strict({"a": NUMBER}, additionalProperties={}), True, OPEN.format("()")),
    (make_strict({"a": NUMBER, "b": NUMBER}, required=["a"]), True, OPTIONAL.format("()", "b")),
    (make_strict({"a": NUMBER}, required=None), True, OPTIONAL.format("()", "a")),
    (
        make_strict({"a": {"type": "array", "items": {"type": ["object", "null"]}}}),
        True,
        OPEN.format("('properties', 'a', 'items')"),
    ),
    (
        make_strict({"a": {"anyOf": [NUMBER, {"type": "object"}]}}),
        True,
        OPEN.format("('properties', 'a', 'anyOf', '1')"),
    ),
    (
        make_strict({}, **{"$defs": {"d": make_strict({"a": NUMBER}, required=[])}}),
        True,
        OPTIONAL.format("('$defs', 'd')", "a"),
    ),
]
SCHEMA_ROWS = [
    *(
        Row(
            make_function(parameters, strict),
            f"Invalid schema for function 'f': {problem}",
            param="tools[0].parameters",
            code="invalid_function_parameters",
        )
        for parameters, strict, problem in FUNCTION_PROBLEMS
    ),
    *(
        Row(
            make_format(schema),
            f"Invalid schema for response_format 'n': {problem}",
            param="text.format.schema",
            code="invalid_json_schema",
        )
        for schema, strict, problem in FUNCTION_PROBLEMS
        if strict or not schema
    ),
    *(
        Row(
            JSON_OBJECT | instructions,
            "Response input messages must contain the word 'json' in some form to use 'text.format' "
            "of type 'json_object'.",
        )
        for instructions in ({}, {"instructions": "Answer in JSON."})
    ),
]


@for_each(
    "body",
    [
        make_function({"type": "object"}),
        make_function({"type": "object", "properties": {"a": NUMBER}}, strict=False),
        make_function(make_strict({"a": {"anyOf": [NUMBER, {"type": "null"}]}}), strict=True),
        make_function(make_strict({}) | {"properties": [], "items": [], "anyOf": {}}, strict=True),
        make_format(make_strict({"a": make_strict({"type": NUMBER})})),
        JSON_OBJECT | {"input": "Answer in Json."},
        JSON_OBJECT | {"input": [{"role": "system", "content": "JSON"}]},
    ],
)
def test_valid_schema_and_format_are_accepted(api: Api, body: Body) -> None:
    """Schemas without strict mode may be open, and any message may mention JSON."""
    api.create(**body)


def test_schemas_that_other_servers_accept_are_accepted_in_front_of_them() -> None:
    """Where unknown parameters are ignored, schemas and the format JSON are not checked like by the hosted API."""
    with serve(unknown_parameters="ignore") as server, open_client(server) as http:
        lenient = Api(server, http)
        for row in SCHEMA_ROWS:
            lenient.create(**row.send)


def test_json_may_be_mentioned_in_an_earlier_response(api: Api) -> None:
    """The context of a continued response may mention JSON."""
    first = api.create(input="Always answer in JSON.")
    api.create(previous_response_id=first["id"], **JSON_OBJECT)


SHAPE_ROWS = [Row(send, message, param=param, code=code) for send, param, code, message in ROWS]


@for_each("row", [*STATE_ROWS, *SCHEMA_ROWS, *SHAPE_ROWS])
def test_server_returns_the_published_error(api: Api, row: Row) -> None:
    """Status, message, type, param and code are as published, as JSON even for a stream."""
    for stream in ({}, {"stream": True}):
        values = row.prepare(api)
        body = fill_placeholders(make_body(row.send), values)
        if not any(name.startswith("st") for name in body):  # a key that is sent is not suggested
            body = stream | body
        answer = api.post(body)
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


CONVERSATION = {"conversation": "conv_x"}
PREVIOUS = {"previous_response_id": "resp_x"}
PROMPT = {"prompt": {"id": "pmpt_x"}}


@for_each(
    ("send", "message"),
    [
        ({"truncation": "bogus", **PREVIOUS}, "Invalid value: 'bogus'."),
        ({"truncation": "bogus", **CONVERSATION}, "Invalid value: 'bogus'."),
        ({**PROMPT, **CONVERSATION}, "Conversation with id 'conv_x' not found."),
        ({**PROMPT, **PREVIOUS}, "Prompt with id 'pmpt_x' not found."),
    ],
)
def test_order_of_state_checks(api: Api, send: Body, message: str) -> None:
    """The schema is checked before the conversation, the prompt and the previous response, in this order."""
    error = api.post(make_body(send)).json()["error"]
    assert error["message"].startswith(message)
