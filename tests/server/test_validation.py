"""Every published error for a malformed request, the order of the checks, what is accepted, and tool choices."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.schema import requests
from kedge.server.schema.items import ITEM_TYPES

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "x"}
ASSISTANT = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "OK", "annotations": []}],
}
ITEM_NAMES = sorted(ITEM_TYPES.keys() - {"configuration_update"})
NAMES = {
    "<items>": f"{', '.join(map(repr, ITEM_NAMES[:-1]))}, and {ITEM_NAMES[-1]!r}",
    "<includes>": "'file_search_call.results', 'web_search_call.results', "
    "'web_search_call.action.sources', 'message.input_image.image_url', "
    "'computer_call_output.output.image_url', 'code_interpreter_call.outputs', "
    "'reasoning.encrypted_content', and 'message.output_text.logprobs'",
    "<parts>": "'input_text', 'input_image', 'input_audio', 'output_text', 'refusal', 'input_file', "
    "'computer_screenshot', 'summary_text', and 'encrypted_content'",
    "<cut includes>": "'fil...lts', 'web...lts', 'web...ces', 'mes...url', 'com...url', "
    "'cod...uts', 'rea...ent', or 'mes...obs'",
    "<roles>": "'assistant', 'system', 'developer', and 'user'",
    "<longest>": "x" * 513,
    "<user>": '{"role": "user", "content": "x"}',
    "<17 members>": ", ".join(f'"k{n}": "v"' for n in range(17)),
    "<assistant>": json.dumps(ASSISTANT)[1:-1],
}
"""Texts that are too long for the tables."""

MOVED = (
    "Unsupported parameter: 'messages'. In the Responses API, this parameter has moved to 'input'. "
    "Try again with the new parameter. See the API documentation for more information: "
    "https://platform.openai.com/docs/api-reference/responses/create."
)
TABLES = {
    ("missing_required_parameter", "Missing required parameter: '{path}'."): """
        "input": ...                                                         | input
        "model": ...                                                         | model
        "input": [{"role": "user"}]                                          | input[0].content
        "input": [{"role": "user", "content": [{"type": "input_text"}]}]     | input[0].content[0].text
        "input": [{"type": "function_call_output", "output": "x"}]           | input[0].call_id
        "tools": [{}]                                                        | tools[0].type
        "tools": [{"type": "function"}]                                      | tools[0].name
        "text": {"format": {"type": "json_schema", "name": "x"}}             | text.format.schema
        "conversation": {}                                                   | conversation.id
    """,
    ("unknown_parameter", "Unknown parameter: '{path}'."): """
        "n": 1                                                               | n
        "max_tokens": 1                                                      | max_tokens
        "inpu": 1                                                            | inpu
        "input": [{"role": "user", "content": "", "bogus": 1}]               | input[0].bogus
        "input": [{"role": "user", "content": "x", "phase": "final_answer"}] | input[0].phase
        "input": [{"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed"}]
                                                                             | input[0].status
        "reasoning": {"bogus": 1}                                            | reasoning.bogus
        "stream_options": {"include_usage": true}                            | stream_options.include_usage
    """,
    ("unknown_parameter", "Unknown parameter: '{path}'. Did you mean {0}?"): """
        "stop": 1   | stop   | 'store'
        "stre": 1   | stre   | 'store' or 'stream'
        "strem": 1  | strem  | 'stream' or 'store'
    """,
    ("unsupported_parameter", MOVED): """
        "input": ..., "messages": [] |
        "messages": []               |
    """,
    ("invalid_type", "Invalid type for '{path}': expected {0}, but got {1} instead."): """
        "previous_response_id": {}                    | previous_response_id | a string | an object
        "model": 7                                    | model                | a string | an integer
        "model": null                                 | model                | a string | an object
        "input": null                                 | input                | a string | an object
        "input": {"a": 1}                             | input | one of a string or array of input items | an object
        "input": [7]                                  | input[0]             | an input item | an integer
        "input": [null]                               | input[0]             | an input item | null
        "input": [{"role": "user", "content": null}]  | input[0].content | one of an array of objects or string | null
        "stream": "x"                                 | stream               | a boolean | a string
        "reasoning": "x"                              | reasoning            | an object | a string
        "temperature": "x"                            | temperature          | a decimal | a string
        "temperature": true                           | temperature          | a decimal | a boolean
        "max_output_tokens": 1000.0                   | max_output_tokens    | an integer | a decimal number
        "metadata": "x"                               | metadata             | a metadata object | a string
        "metadata": {"a": 1}                          | metadata.a           | a string | an integer
        "tools": "x"                                  | tools                | an array of tools | a string
        "tool_choice": 7       | tool_choice | one of an object or 'none', 'auto', or 'required' | an integer
        "include": "x"         | include | an array of one of <cut includes> | a string
        "conversation": [1]    | conversation | one of a string or object | an array
    """,
    ("invalid_value", "Invalid value: '{0}'. Supported values are: {1}."): """
        "input": [{"type": "bogus_item"}]                | input[0] | bogus_item | <items>
        "input": [{"role": "bogus", "content": "x"}]     | input[0] | bogus | <roles>
        "input": [{}]                                    | input[0] | | <roles>
        "input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}] | input[0].content[0]
            | output_text | 'input_text', 'input_image', 'input_file', 'scoped_content', and 'input_audio'
        "input": [{"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}] | input[0].content[0]
            | input_text | 'output_text' and 'refusal'
        "input": [{"role": "user", "content": [{"type": "bogus", "text": "x"}]}]
            | input[0].content[0].type | bogus | <parts>
        "input": [{<assistant>, "phase": "bogus"}]       | input[0].phase | bogus | 'commentary' and 'final_answer'
        "tool_choice": "bogus"                           | tool_choice | bogus | 'none', 'auto', and 'required'
        "include": ["bogus.thing"]                       | include[0] | bogus.thing | <includes>
        "reasoning": {"effort": "bogus"}
            | reasoning.effort | bogus | 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', and 'max'
        "text": {"format": {"type": "bogus"}} | text.format.type | bogus | 'json_object', 'text', and 'json_schema'
    """,
    ("invalid_value", "Invalid '{path}': '{0}'. Expected an ID that {1}."): """
        "previous_response_id": "@results.ress" | previous_response_id | @results.ress
            | contains letters, numbers, underscores, or dashes, but this value contained additional characters
        "input": [<user>, <user>, {"type": "function_call_output", "id": "ctco_1", "call_id": "c", "output": "x"}]
            | input[2].id | ctco_1 | begins with 'fc'
        "input": [{"role": "user", "content": "x", "id": "item_1"}] | input[0].id | item_1 | begins with 'msg'
    """,
    (None, "Unsupported context_management type: '{0}'."): """
        "context_management": [{"type": "foo"}] | context_management | foo
    """,
    ("invalid_value", "Invalid '{path}': string does not match pattern. Expected {0}."): """
        "tools": [{"type": "function", "name": "fs.read"}] | tools[0].name
            | a string that matches the pattern '^[a-zA-Z0-9_-]+$'
    """,
    (
        "empty_string",
        "Invalid '{path}': empty string. Expected {0}, but got an empty string instead.",
    ): """
        "previous_response_id": "" | previous_response_id | a string with minimum length 1
        "input": [{"type": "function_call_output", "call_id": "", "output": "x"}]
            | input[0].call_id | a string with minimum length 1
    """,
    ("string_above_max_length", "Invalid '{path}': string too long. Expected {0} instead."): """
        "input": [{"type": "function_call_output", "call_id": "<longest>", "output": "x"}]
            | input[0].call_id | a string with maximum length 64, but got a string with length 513
        "metadata": {"k": "<longest>"}
            | metadata.k | a string with maximum length 512, but got a string with length 513
    """,
    ("integer_below_min_value", "Invalid '{path}': integer below minimum value. {0} instead."): """
        "max_output_tokens": 0 | max_output_tokens | Expected a value >= 16, but got 0
        "max_tool_calls": 0    | max_tool_calls    | Expected a value >= 1, but got 0
        "context_management": [{"type": "compaction", "compact_threshold": 1}]
            | context_management[0].compact_threshold | Expected a value >= 1000, but got 1
    """,
    ("integer_above_max_value", "Invalid '{path}': integer above maximum value. {0} instead."): """
        "top_logprobs": 21 | top_logprobs | Expected a value <= 20, but got 21
        "max_output_tokens": 18446744073709551616
            | max_output_tokens | Expected a value <= 9223372036854775807, but got 18446744073709551616
    """,
    ("decimal_above_max_value", "Invalid '{path}': decimal above maximum value. {0} instead."): """
        "temperature": 2.1 | temperature | Expected a value <= 2, but got 2.1
    """,
    ("decimal_below_min_value", "Invalid '{path}': decimal below minimum value. {0} instead."): """
        "temperature": -2.5 | temperature | Expected a value >= 0, but got -2.5
    """,
    (
        "object_above_max_properties",
        "Invalid '{path}': too many properties. Expected {0}, but got {1} instead.",
    ): """
        "metadata": {<17 members>}
            | metadata | an object with at most 16 properties | an object with 17 properties
    """,
    (
        "empty_array",
        "Invalid '{path}': empty array. Expected {0}, but got an empty array instead.",
    ): """
        "context_management": [] | context_management | an array with minimum length 1
    """,
}
"""By code and message: members of a request, the path of the error, and the words of the message."""


def read_tables() -> Iterator[tuple[dict[str, Any], str | None, str | None, str]]:
    """Yield the members of each request with the param, code and message of its error."""
    for (code, message), table in TABLES.items():
        for row in re.sub(r"\n +\|", " |", table).strip().splitlines():
            for name, text in NAMES.items():
                row = row.replace(name, text)  # noqa: PLW2901
            members, path, *words = (cell.strip() for cell in row.split("|"))
            fragment = json.loads(f"{{{members}}}".replace("...", '"absent"'))
            yield fragment, path or None, code, message.format(*words, path=path)


ROWS = list(read_tables())
"""All malformed requests, which ``test_published_errors.py`` sends to the server."""


def item(**members: Any) -> dict[str, Any]:
    """Return the input of a request with one item."""
    return {"input": [members]}


def make_body(fragment: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the fragment merged in, without the parameters that are "absent"."""
    body = {"model": "practice", "input": "ping"} | fragment
    return {name: value for name, value in body.items() if value != "absent"}


ORDER = [
    ("model", {"model": "absent", "input": "absent", "zzz": 1}),
    ("input", {"input": "absent", "zzz": 1, "truncation": "bogus"}),
    ("zzz", {"zzz": 1, "input": [{}]}),
    ("input", {"input": 7, "truncation": "bogus"}),
    ("input", {"input": 7, "previous_response_id": "@"}),
    ("input[0]", {"input": [{}], "truncation": "bogus"}),
]


def test_order_of_checks_is_fixed() -> None:
    """The reported error does not depend on the order of the parameters in the request."""
    for param, fragment in ORDER:
        backwards = dict(reversed(make_body(fragment).items()))
        for request in (make_body(fragment), backwards):
            with pytest.raises(ApiError) as exc_info:
                requests.check_create(request)
            assert exc_info.value.param == param


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"input": []},
    {"input": [ASSISTANT, {"role": "user", "content": "again"}]},
    item(role="user", content="x", status="completed", id="msg_x"),
    {"input": [{"id": "msg_1"}, {"type": "item_reference", "id": "rs_1"}]},
    item(type="configuration_update", reasoning={"effort": "low"}),
    {"service_tier": "ultrafast"},
    {"input": [USER, {"type": "image_generation_call", "id": "ig_1"}, USER]},
    item(type="image_generation_call", id="ig_1", status="completed", error=None, svg_usage=None),
    item(type="mcp_call", id="mcp_1", server_label="x", name="f", arguments="{}", status=None),
]


def test_valid_request_is_accepted() -> None:
    """Requests that the API accepts are accepted, and empty input in a context."""
    for fragment in ACCEPTED:
        requests.check_create(make_body(fragment))
    for empty in ([], ""):
        requests.check_not_empty({"input": empty, "previous_response_id": "resp_1"})
        requests.check_not_empty({"input": empty, "conversation": "conv_1"})


def test_last_duplicate_key_wins() -> None:
    """Of duplicate keys the last one is used, as in other JSON parsers."""
    assert requests.parse_body(b'{"a": 1, "a": 2}') == {"a": 2}


@for_each(
    ("fragment", "param"),
    [
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"input": "\ud800"}, "input"),
        ({"metadata": {"\udfff": "x"}}, "metadata"),
        ({"instructions": "ok \udc00"}, "instructions"),
        ({"tools": [FUNCTION | {"parameters": {"x": ["\ud800"]}}]}, "tools[0].parameters"),
        ({"tools": [FUNCTION | {"parameters": {"x": float("inf")}}]}, "tools[0].parameters"),
    ],
)
def test_values_that_cannot_be_stored_are_rejected(fragment: dict[str, Any], param: str) -> None:
    """Infinities and lone surrogates are rejected, although Python's JSON parser accepts them."""
    with pytest.raises(ApiError) as exc_info:
        requests.check_create(make_body(fragment))
    assert (exc_info.value.param, exc_info.value.code) == (param, "invalid_value")


def test_nesting_of_free_form_json_is_limited() -> None:
    """The parameters of a tool have a maximum depth, so that they cannot exhaust the stack."""

    def nested(depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {"type": "object"}
        for _ in range(depth):
            value = {"type": "object", "items": value}
        return make_body({"tools": [FUNCTION | {"parameters": value}]})

    requests.check_create(nested(90))
    with pytest.raises(ApiError, match="nested too deeply") as exc_info:
        requests.check_create(nested(500))
    assert exc_info.value.param == "tools[0].parameters"


def test_null_is_no_conversation_and_no_previous_response(http: httpx2.Client) -> None:
    """Of the two, which exclude each other, one may be null."""
    both = {"conversation": "conv_1", "previous_response_id": "resp_1"}
    for name in both:
        answer = http.post("/v1/responses", json=make_body({**both, name: None}))
        assert "not found" in answer.json()["error"]["message"]


OTHER_CHECKS = [
    (requests.check_input_tokens, {}, {"modle": 1}, "modle"),
    (requests.check_input_tokens, {"input": "x", "model": "m"}, {"input": 7}, "input"),
    (requests.check_compact, {"model": "m", "input": []}, {"input": []}, "model"),
    (requests.check_compact, {"model": "m"}, {"model": "m", "tools": []}, "tools"),
    (requests.check_conversation_create, {}, {"item": []}, "item"),
    (requests.check_conversation_create, {"items": None}, {"metadata": 1}, "metadata"),
    (requests.check_conversation_create, {"items": [USER] * 20}, {"items": [USER] * 21}, "items"),
    (requests.check_conversation_update, {"metadata": {"a": "b"}}, {}, "metadata"),
    (requests.check_conversation_items, {"items": [USER]}, {"items": [{}]}, "items[0]"),
    (requests.check_conversation_items, {"items": []}, {}, "items"),
    (requests.check_conversation_items, {"items": [USER] * 20}, {"items": [USER] * 21}, "items"),
]


@for_each(("check", "good", "bad", "param"), OTHER_CHECKS)
def test_other_endpoints_validate_their_bodies(
    check: Any, good: dict[str, Any], bad: dict[str, Any], param: str
) -> None:
    """Token counting, compaction and conversations validate their own parameters."""
    check(good)
    with pytest.raises(ApiError) as exc_info:
        check(bad)
    assert exc_info.value.param == param


CUSTOM = {"type": "custom", "name": "f"}
SEARCH = {"type": "web_search_preview_2025_03_11"}
MCP = {"type": "mcp", "server_label": "s"}
NAMESPACE = {"type": "namespace", "name": "n", "description": "", "tools": [FUNCTION]}
ADDITIONAL_TOOLS = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}

AVAILABLE: list[tuple[Any, list[Any], list[Any]]] = [
    (None, [], []),
    ("auto", [], []),
    ("none", [], []),
    ("required", [FUNCTION], []),
    ("required", [], [ADDITIONAL_TOOLS]),
    ({"type": "function", "name": "f"}, [FUNCTION], []),
    ({"type": "function", "name": "f"}, [NAMESPACE], []),
    ({"type": "function", "name": "f"}, [], [{"role": "user", "content": "x"}, ADDITIONAL_TOOLS]),
    ({"type": "custom", "name": "f"}, [FUNCTION, CUSTOM], []),
    ({"type": "mcp", "server_label": "s", "name": "t"}, [MCP], []),
    ({"type": "web_search_preview"}, [SEARCH], []),
    ({"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION, MCP]}, [MCP, FUNCTION], []),
]
UNAVAILABLE: list[tuple[Any, list[Any], str]] = [
    ("required", [], "Tool choice 'required' must be specified with 'tools' parameter."),
    ({"type": "function", "name": "g"}, [FUNCTION], "Tool choice 'g' not found in 'tools'"),
    ({"type": "function", "name": "f"}, [CUSTOM], "Tool choice 'f' not found in 'tools'"),
    ({"type": "mcp", "server_label": "x"}, [MCP], "Tool choice 'x' not found in 'tools'"),
    ({"type": "shell"}, [FUNCTION], "Tool choice 'shell' not found in 'tools' parameter."),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION, CUSTOM]},
        [FUNCTION],
        "Tool choice 'f' not found in 'tools' parameter.",
    ),
]


@for_each(("choice", "tools", "seen"), AVAILABLE)
def test_available_tool_is_accepted(choice: Any, tools: list[Any], seen: list[Any]) -> None:
    """A tool may be defined by the request, by a namespace or by an item of the context."""
    requests.check_tool_choice({"tool_choice": choice, "tools": tools}, seen)


@for_each(("choice", "tools", "message"), UNAVAILABLE)
def test_unavailable_tool_is_rejected(choice: Any, tools: list[Any], message: str) -> None:
    """The error contains the tool choice that was not found, as in the hosted API."""
    with pytest.raises(ApiError) as exc_info:
        requests.check_tool_choice({"tool_choice": choice, "tools": tools}, [])
    assert exc_info.value.message.startswith(message)
    assert (exc_info.value.param, exc_info.value.code) == ("tool_choice", None)
