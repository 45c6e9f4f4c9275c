"""Every published error for a malformed request, the order of the checks, and what is accepted."""

from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.schema import requests

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
ASSISTANT = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "OK", "annotations": []}],
}
ITEM_TYPES = (
    "'additional_tools', 'agent_message', 'apply_patch_call', 'apply_patch_call_output', "
    "'code_interpreter_call', 'compaction', 'compaction_trigger', 'computer_call', "
    "'computer_call_output', 'custom_tool_call', 'custom_tool_call_output', 'file_search_call', "
    "'function_call', 'function_call_output', 'image_generation_call', 'item_reference', "
    "'local_shell_call', 'local_shell_call_output', 'mcp_approval_request', "
    "'mcp_approval_response', 'mcp_call', 'mcp_list_tools', 'message', 'multi_agent_call', "
    "'multi_agent_call_output', 'program', 'program_output', 'reasoning', 'shell_call', "
    "'shell_call_output', 'tool_search_call', 'tool_search_output', and 'web_search_call'"
)
INCLUDES = (
    "'file_search_call.results', 'web_search_call.results', 'web_search_call.action.sources', "
    "'message.input_image.image_url', 'computer_call_output.output.image_url', "
    "'code_interpreter_call.outputs', 'reasoning.encrypted_content', and "
    "'message.output_text.logprobs'"
)
MOVED = (
    "Unsupported parameter: 'messages'. In the Responses API, this parameter has moved to "
    "'input'. Try again with the new parameter. See the API documentation for more "
    "information: https://platform.openai.com/docs/api-reference/responses/create."
)
ROLES = "'assistant', 'system', 'developer', and 'user'"

Row = tuple[str, dict[str, Any], str | None, str | None, str]


def item(**members: Any) -> dict[str, Any]:
    """Return the input of a request with one item."""
    return {"input": [members]}


PRESENCE: list[Row] = [
    (
        "input absent",
        {"input": ...},
        "input",
        "missing_required_parameter",
        "Missing required parameter: 'input'.",
    ),
    (
        "input absent, although there is a previous response",
        {"input": ..., "previous_response_id": "resp_1"},
        "input",
        "missing_required_parameter",
        "Missing required parameter: 'input'.",
    ),
    (
        "model absent",
        {"model": ...},
        "model",
        "missing_required_parameter",
        "Missing required parameter: 'model'.",
    ),
    (
        "messages instead of input",
        {"input": ..., "messages": []},
        None,
        "unsupported_parameter",
        MOVED,
    ),
    (
        "messages beside input",
        {"messages": []},
        None,
        "unsupported_parameter",
        MOVED,
    ),
]


def unknown_row(name: str, rest: str = "") -> Row:
    return (
        f"unknown key {name}",
        {name: 1},
        name,
        "unknown_parameter",
        f"Unknown parameter: '{name}'.{rest}",
    )


UNKNOWN: list[Row] = [
    unknown_row("n"),
    unknown_row("stop", " Did you mean 'store'?"),
    unknown_row("seed"),
    unknown_row("generate"),  # which exists only on a WebSocket
    unknown_row("logprobs"),
    unknown_row("max_tokens"),
    unknown_row("sto", " Did you mean 'store'?"),
    unknown_row("st"),
    unknown_row("stre", " Did you mean 'store' or 'stream'?"),
    unknown_row("strem", " Did you mean 'stream' or 'store'?"),
    unknown_row("tool", " Did you mean 'tools'?"),
    unknown_row("usr", " Did you mean 'user'?"),
    unknown_row("inclde", " Did you mean 'include'?"),
    unknown_row("inpu"),
    unknown_row("modell"),
]


def wrong_type_row(value: object, path: str, expected: str, actual: str) -> Row:
    name = path.split(".", maxsplit=1)[0].split("[", maxsplit=1)[0]
    return (
        f"{path} is {actual}",
        {name: value},
        path,
        "invalid_type",
        f"Invalid type for '{path}': expected {expected}, but got {actual} instead.",
    )


TYPES: list[Row] = [
    wrong_type_row({}, "previous_response_id", "a string", "an object"),
    wrong_type_row(7, "model", "a string", "an integer"),
    wrong_type_row(None, "model", "a string", "an object"),
    wrong_type_row(None, "input", "a string", "an object"),
    wrong_type_row({"a": 1}, "input", "one of a string or array of input items", "an object"),
    wrong_type_row([7], "input[0]", "an input item", "an integer"),
    wrong_type_row([None], "input[0]", "an input item", "null"),
    wrong_type_row(
        [{"role": "user", "content": None}],
        "input[0].content",
        "one of an array of objects or string",
        "null",
    ),
    wrong_type_row("x", "stream", "a boolean", "a string"),
    wrong_type_row(1, "stream", "a boolean", "an integer"),
    wrong_type_row("x", "reasoning", "an object", "a string"),
    wrong_type_row("x", "temperature", "a decimal", "a string"),
    wrong_type_row(True, "temperature", "a decimal", "a boolean"),
    wrong_type_row("x", "max_output_tokens", "an integer", "a string"),
    wrong_type_row(True, "max_output_tokens", "an integer", "a boolean"),
    wrong_type_row(1000.0, "max_output_tokens", "an integer", "a decimal number"),
    wrong_type_row("x", "metadata", "a metadata object", "a string"),
    wrong_type_row({"a": 1}, "metadata.a", "a string", "an integer"),
    wrong_type_row("x", "tools", "an array of tools", "a string"),
    wrong_type_row(["x"], "tools[0]", "a tool", "a string"),
    wrong_type_row("x", "context_management", "an array of objects", "a string"),
    wrong_type_row(
        7, "tool_choice", "one of an object or 'none', 'auto', or 'required'", "an integer"
    ),
    wrong_type_row({}, "truncation", "one of 'auto' or 'disabled'", "an object"),
    wrong_type_row(
        {}, "service_tier", "one of 'auto', 'default', 'fast', 'flex', or 'priority'", "an object"
    ),
    wrong_type_row(
        "x",
        "include",
        "an array of one of 'fil...lts', 'web...lts', 'web...ces', 'mes...url', 'com...url', "
        "'cod...uts', 'rea...ent', or 'mes...obs'",
        "a string",
    ),
    wrong_type_row([1], "conversation", "one of a string or object", "an array"),
]


def wrong_value_row(fragment: dict[str, Any], path: str, value: str, supported: str) -> Row:
    return (
        f"{path} is {value!r}",
        fragment,
        path,
        "invalid_value",
        f"Invalid value: '{value}'. Supported values are: {supported}.",
    )


VALUES: list[Row] = [
    wrong_value_row(item(type="bogus_item"), "input[0]", "bogus_item", ITEM_TYPES),
    wrong_value_row(item(type=7, role="user"), "input[0]", "", ITEM_TYPES),
    wrong_value_row(item(role="bogus", content="x"), "input[0]", "bogus", ROLES),
    wrong_value_row({"input": [{}]}, "input[0]", "", ROLES),
    wrong_value_row(item(type="message", content="x"), "input[0]", "", ROLES),
    wrong_value_row(
        item(role="user", content=[{"type": "output_text", "text": "x"}]),
        "input[0].content[0]",
        "output_text",
        "'input_text', 'input_image', 'input_file', 'scoped_content', and 'input_audio'",
    ),
    wrong_value_row(
        item(role="assistant", content=[{"type": "input_text", "text": "x"}]),
        "input[0].content[0]",
        "input_text",
        "'output_text' and 'refusal'",
    ),
    wrong_value_row(
        item(role="user", content=[{"type": "bogus", "text": "x"}]),
        "input[0].content[0].type",
        "bogus",
        "'input_text', 'input_image', 'input_audio', 'output_text', 'refusal', 'input_file', "
        "'computer_screenshot', 'summary_text', and 'encrypted_content'",
    ),
    wrong_value_row(
        {"input": [ASSISTANT | {"phase": "bogus"}]},
        "input[0].phase",
        "bogus",
        "'commentary' and 'final_answer'",
    ),
    wrong_value_row(
        {"tool_choice": "bogus"}, "tool_choice", "bogus", "'none', 'auto', and 'required'"
    ),
    wrong_value_row({"truncation": "bogus"}, "truncation", "bogus", "'auto' and 'disabled'"),
    wrong_value_row({"include": ["bogus.thing"]}, "include[0]", "bogus.thing", INCLUDES),
    wrong_value_row(
        {"reasoning": {"effort": "bogus"}},
        "reasoning.effort",
        "bogus",
        "'none', 'minimal', 'low', 'medium', 'high', 'xhigh', and 'max'",
    ),
    wrong_value_row(
        {"reasoning": {"summary": "bogus"}},
        "reasoning.summary",
        "bogus",
        "'concise', 'detailed', and 'auto'",
    ),
    wrong_value_row(
        {"text": {"format": {"type": "bogus"}}},
        "text.format.type",
        "bogus",
        "'json_object', 'text', and 'json_schema'",
    ),
    wrong_value_row(
        {"text": {"verbosity": "bogus"}}, "text.verbosity", "bogus", "'low', 'medium', and 'high'"
    ),
    wrong_value_row(
        {"service_tier": "bogus"},
        "service_tier",
        "bogus",
        "'auto', 'default', 'fast', 'flex', and 'priority'",
    ),
    wrong_value_row(
        {"prompt_cache_retention": "x"}, "prompt_cache_retention", "x", "'in_memory' and '24h'"
    ),
]


def member_row(kind: str, fragment: dict[str, Any], path: str) -> Row:
    code, sentence = {
        "missing": ("missing_required_parameter", "Missing required parameter"),
        "unknown": ("unknown_parameter", "Unknown parameter"),
    }[kind]
    return (f"{kind} {path}", fragment, path, code, f"{sentence}: '{path}'.")


MEMBERS: list[Row] = [
    member_row("unknown", item(role="user", content="", bogus=1), "input[0].bogus"),
    member_row("unknown", {"input": [ASSISTANT | {"zzz": 1}]}, "input[0].zzz"),
    member_row(
        "unknown",
        item(role="user", content="x", phase="final_answer"),
        "input[0].phase",
    ),
    member_row(
        "unknown",
        item(type="reasoning", id="rs_1", summary=[], status="completed"),
        "input[0].status",
    ),
    member_row("unknown", {"reasoning": {"bogus": 1}}, "reasoning.bogus"),
    member_row(
        "unknown", {"stream_options": {"include_usage": True}}, "stream_options.include_usage"
    ),
    member_row("unknown", {"prompt_cache_options": {"bogus": 1}}, "prompt_cache_options.bogus"),
    member_row("unknown", {"text": {"zzz": 1}}, "text.zzz"),
    member_row("missing", item(role="user"), "input[0].content"),
    member_row(
        "missing",
        item(role="user", content=[{"type": "input_text"}]),
        "input[0].content[0].text",
    ),
    member_row("missing", item(type="reasoning", id="rs_1"), "input[0].summary"),
    member_row(
        "missing",
        item(type="function_call_output", output="x"),
        "input[0].call_id",
    ),
    member_row("missing", {"tools": [{}]}, "tools[0].type"),
    member_row("missing", {"tools": [{"type": "function"}]}, "tools[0].name"),
    member_row(
        "missing", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"
    ),
    member_row("missing", {"tool_choice": {"type": "function"}}, "tool_choice.name"),
    member_row(
        "missing", {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.name"
    ),
    member_row("missing", {"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    member_row(
        "missing", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"
    ),
    member_row("missing", {"conversation": {}}, "conversation.id"),
    member_row("missing", {"prompt": {}}, "prompt.id"),
]


def bound_row(fragment: dict[str, Any], path: str, code: str, problem: str, expected: str) -> Row:
    return (
        f"{code} {path}",
        fragment,
        path,
        code,
        f"Invalid '{path}': {problem}. Expected {expected} instead.",
    )


def make_result(call_id: str) -> dict[str, Any]:
    return item(type="function_call_output", call_id=call_id, output="x")


NOT_EMPTY = (
    "empty_string",
    "empty string",
    "a string with minimum length 1, but got an empty string",
)
TOO_LONG = ("string_above_max_length", "string too long")
TOO_SMALL = ("integer_below_min_value", "integer below minimum value")
TOO_LARGE = ("integer_above_max_value", "integer above maximum value")
BOUNDS: list[Row] = [
    (
        "bad characters in the previous id",
        {"previous_response_id": "@results.ress"},
        "previous_response_id",
        "invalid_value",
        (
            "Invalid 'previous_response_id': '@results.ress'. Expected an ID that contains letters, "
            "numbers, underscores, or dashes, but this value contained additional characters."
        ),
    ),
    (
        "wrong id prefix",
        {
            "input": [{"role": "user", "content": "x"}] * 8
            + [{**make_result("call_1")["input"][0], "id": "ctco_1"}]
        },
        "input[8].id",
        "invalid_value",
        "Invalid 'input[8].id': 'ctco_1'. Expected an ID that begins with 'fc'.",
    ),
    (
        "a message's id without its prefix",
        item(role="user", content="x", id="item_1"),
        "input[0].id",
        "invalid_value",
        "Invalid 'input[0].id': 'item_1'. Expected an ID that begins with 'msg'.",
    ),
    (
        "a tool's name with a dot",
        {"tools": [{"type": "function", "name": "fs.read"}]},
        "tools[0].name",
        "invalid_value",
        (
            "Invalid 'tools[0].name': string does not match pattern. Expected a string that matches "
            "the pattern '^[a-zA-Z0-9_-]+$'."
        ),
    ),
    (
        "another kind of context management",
        {"context_management": [{"type": "foo"}]},
        "context_management",
        None,
        "Unsupported context_management type: 'foo'.",
    ),
    bound_row({"previous_response_id": ""}, "previous_response_id", *NOT_EMPTY),
    bound_row(make_result(""), "input[0].call_id", *NOT_EMPTY),
    bound_row(
        make_result("c" * 116),
        "input[0].call_id",
        *TOO_LONG,
        "a string with maximum length 64, but got a string with length 116",
    ),
    bound_row(
        {"metadata": {"k": "v" * 513}},
        "metadata.k",
        *TOO_LONG,
        "a string with maximum length 512, but got a string with length 513",
    ),
    bound_row(
        {"max_output_tokens": 0}, "max_output_tokens", *TOO_SMALL, "a value >= 16, but got 0"
    ),
    bound_row({"max_tool_calls": 0}, "max_tool_calls", *TOO_SMALL, "a value >= 1, but got 0"),
    bound_row(
        {"context_management": [{"type": "compaction", "compact_threshold": 1}]},
        "context_management[0].compact_threshold",
        *TOO_SMALL,
        "a value >= 1000, but got 1",
    ),
    bound_row({"top_logprobs": 21}, "top_logprobs", *TOO_LARGE, "a value <= 20, but got 21"),
    bound_row(
        {"max_output_tokens": 2**64},  # which no store can hold
        "max_output_tokens",
        *TOO_LARGE,
        "a value <= 9223372036854775807, but got 18446744073709551616",
    ),
    bound_row(
        {"temperature": 2.1},
        "temperature",
        "decimal_above_max_value",
        "decimal above maximum value",
        "a value <= 2, but got 2.1",
    ),
    bound_row(
        {"temperature": -2.5},
        "temperature",
        "decimal_below_min_value",
        "decimal below minimum value",
        "a value >= 0, but got -2.5",
    ),
    bound_row(
        {"metadata": {f"k{i}": "v" for i in range(17)}},
        "metadata",
        "object_above_max_properties",
        "too many properties",
        "an object with at most 16 properties, but got an object with 17 properties",
    ),
    bound_row(
        {"context_management": []},
        "context_management",
        "empty_array",
        "empty array",
        "an array with minimum length 1, but got an empty array",
    ),
]

ROWS = PRESENCE + UNKNOWN + TYPES + VALUES + MEMBERS + BOUNDS
"""All malformed requests, which ``test_published_errors.py`` sends to the server."""


def make_body(fragment: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the fragment merged in; ``...`` removes a parameter."""
    body = {"model": "practice", "input": "ping"} | fragment
    return {name: value for name, value in body.items() if value is not ...}


ORDER = [
    ("model", {"model": ..., "input": ..., "zzz": 1}),
    ("input", {"input": ..., "zzz": 1, "truncation": "bogus"}),
    ("zzz", {"zzz": 1, "input": [{}]}),
    ("moderation", {"moderation": "x", "include": ["bogus"]}),
    ("include[0]", {"include": ["bogus"], "tools": "x"}),
    ("input", {"input": 7, "truncation": "bogus"}),
    ("input", {"input": 7, "previous_response_id": "@"}),
    ("input[0]", {"input": [{}], "truncation": "bogus"}),
    ("tools", {"tools": "x", "metadata": "x"}),
    ("metadata", {"metadata": "x", "text": "x"}),
    ("text", {"text": "x", "temperature": "x"}),
    ("temperature", {"temperature": "x", "top_p": "x"}),
    ("top_p", {"top_p": "x", "presence_penalty": "x"}),
    ("parallel_tool_calls", {"parallel_tool_calls": "x", "stream": "x"}),
    ("stream", {"stream": "x", "stream_options": "x"}),
    ("stream_options", {"stream_options": "x", "background": "x"}),
    ("background", {"background": "x", "max_output_tokens": "x"}),
    ("max_output_tokens", {"max_output_tokens": "x", "max_tool_calls": "x"}),
    ("max_tool_calls", {"max_tool_calls": "x", "reasoning": "x"}),
    ("reasoning", {"reasoning": "x", "user": 7}),
    ("user", {"user": 7, "safety_identifier": 7}),
    ("safety_identifier", {"safety_identifier": 7, "prompt_cache_options": "x"}),
    ("prompt_cache_options", {"prompt_cache_options": "x", "prompt_cache_key": 7}),
    ("prompt_cache_key", {"prompt_cache_key": 7, "prompt_cache_retention": "x"}),
    ("prompt_cache_retention", {"prompt_cache_retention": "x", "truncation": "x"}),
    ("truncation", {"truncation": "x", "instructions": 7}),
    ("instructions", {"instructions": 7, "store": "x"}),
    ("store", {"store": "x", "service_tier": "bogus"}),
    ("service_tier", {"service_tier": "bogus", "top_logprobs": "x"}),
    ("top_logprobs", {"top_logprobs": "x", "context_management": "x"}),
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
    item(role="developer", content=[{"type": "input_text", "text": "x"}]),
    item(role="assistant", content=[{"type": "refusal", "refusal": "no"}]),
    item(role="assistant", content="x", phase="commentary"),
    item(type="reasoning", summary=[], encrypted_content="gAAA"),
    {"input": [{"id": "msg_1"}, {"type": "item_reference", "id": "rs_1"}]},
    item(type="configuration_update", reasoning={"effort": "low"}),
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
    {"service_tier": "ultrafast"},
    {"conversation": "conv_1"},
    {"conversation": {"id": "conv_1"}},
    {"temperature": 1, "top_p": 0.5, "presence_penalty": -2},
    {"reasoning": {"generate_summary": "concise"}},
    {
        "input": [
            {"role": "user", "content": "Draw"},
            {"type": "image_generation_call", "id": "ig_1"},
            {"role": "user", "content": "Again"},
        ]
    },
]


def test_valid_request_is_accepted() -> None:
    """Requests that the API accepts are accepted, including null where it is allowed."""
    for fragment in ACCEPTED:
        requests.check_create(make_body(fragment))


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
        value: dict[str, Any] = {}
        for _ in range(depth):
            value = {"items": value}
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


@pytest.mark.parametrize("empty", [[], ""])
def test_empty_input_is_accepted_in_a_context(empty: object) -> None:
    """Empty input is accepted after a previous response and in a conversation."""
    requests.check_not_empty({"input": empty, "previous_response_id": "resp_1"})
    requests.check_not_empty({"input": empty, "conversation": "conv_1"})


OTHER_CHECKS = [
    (requests.check_input_tokens, {}, {"modle": 1}, "modle"),
    (requests.check_input_tokens, {"input": "x", "model": "m"}, {"input": 7}, "input"),
    (requests.check_compact, {"model": "m", "input": []}, {"input": []}, "model"),
    (requests.check_compact, {"model": "m"}, {"model": "m", "tools": []}, "tools"),
    (requests.check_conversation_create, {}, {"item": []}, "item"),
    (requests.check_conversation_create, {"items": None}, {"metadata": 1}, "metadata"),
    (
        requests.check_conversation_create,
        {"items": [{"role": "user", "content": "x"}] * 20},
        {"items": [{"role": "user", "content": "x"}] * 21},
        "items",
    ),
    (requests.check_conversation_update, {"metadata": {"a": "b"}}, {}, "metadata"),
    (
        requests.check_conversation_items,
        {"items": [{"role": "user", "content": "x"}]},
        {"items": [{"role": "user"}]},
        "items[0].content",
    ),
    (requests.check_conversation_items, {"items": []}, {}, "items"),
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
