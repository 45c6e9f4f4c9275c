"""The validation is strict, but no stricter than the API.

Everything that the types of the openai package allow is accepted, each small change that makes it invalid
is rejected with its path, and any other JSON is accepted or rejected without another error.
"""

import copy
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Required, Union, cast, get_args, get_origin

from hypothesis import given
from hypothesis import strategies as st
from openai.types.conversations import conversation_create_params, item_create_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
    response_input_item_param,
    tool_param,
)
from typing_extensions import get_type_hints, is_typeddict

from for_each import for_each
from kedge.server.errors import ApiError
from kedge.server.object_forms import ID_PREFIXES
from kedge.server.schema import requests
from kedge.server.schema.items import ITEM_TYPES
from kedge.testing import serve
from server.conftest import open_client

# Members for which the hosted API is stricter than the package's types, and valid sample values.
OUTPUT_ONLY = {("ResponseReasoningItemParam", "status")}
ALWAYS_REQUIRED = {("FunctionCallOutput", "call_id")}
VALUES: dict[str, Any] = {
    "compact_threshold": 2_000, "max_output_tokens": 16, "score_threshold": 0.5, "name": "a_name",
}  # fmt: skip
TYPES = {"ContextManagement": "compaction"}
STRICT_SCHEMA = {"type": "object", "additionalProperties": False}


def sample_values(hint: Any, name: str = "") -> list[Any]:
    """Return values of a type: one per choice, and objects with minimal and with all members."""
    origin = get_origin(hint)
    args = get_args(hint)
    if name in VALUES and (hint in (str, int, float) or type(None) in args):
        return [VALUES[name]]
    if origin is Required:
        return sample_values(args[0], name)
    if origin is Union:
        return [value for arg in args for value in sample_values(arg, name)]
    if origin is Literal:
        return list(args)
    if is_typeddict(hint):
        return sample_objects(hint)
    if name in ("parameters", "schema") and (origin is dict or hint is object):
        return [STRICT_SCHEMA]
    if origin is dict:
        return [{}, {"key": sample_values(args[1])[0]}]
    if origin is not None:  # a list type
        choices = sample_values(args[0], name)
        return [[choice] for choice in choices]
    return {str: ["text"], int: [1], float: [0.5, 1], bool: [True, False], type(None): [None]}.get(
        hint, [{"any": ["thing"]}]
    )


def sample_objects(shape: Any) -> list[dict[str, Any]]:
    hints = get_type_hints(shape, include_extras=True)
    members = {
        name: sample_values(hint, name)
        for name, hint in hints.items()
        if (shape.__name__, name) not in OUTPUT_ONLY
    }
    if shape.__name__ in TYPES:
        members["type"] = [TYPES[shape.__name__]]
    needed = {name for owner, name in ALWAYS_REQUIRED if owner == shape.__name__}
    required = needed | shape.__required_keys__
    required |= {name for name, hint in hints.items() if get_origin(hint) is Required}
    minimal = {name: values[0] for name, values in members.items() if name in required}
    variants = [
        minimal | {name: value}
        for name, values in members.items()
        for value in values
        if not (value is None and name in needed)
    ]
    return [minimal, *variants, {name: values[0] for name, values in members.items()}]


def with_id(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item with an id that has the prefix of its type."""
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if item.get("id") is not None:
        item = item | {"id": f"{ID_PREFIXES.get(kind, 'x')}_1"}
    return item


def is_model_message(item: dict[str, Any]) -> bool:
    """Return whether the hosted API rejects a message that the package's types allow."""
    content = item.get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    types = {part.get("type", "") for part in parts if isinstance(part, Mapping)}
    if item.get("role") != "assistant":
        return "phase" in item
    return any(kind.startswith("input_") for kind in types)


BETA_ONLY = {"agent_message", "multi_agent_call", "multi_agent_call_output"}
TOOLS = sample_values(tool_param.ToolParam)


@functools.cache
def list_items() -> list[dict[str, Any]]:
    """Return samples of all items."""
    from openai.types.beta import beta_response_input_item_param as beta  # slow to import

    stable = sample_values(response_input_item_param.ResponseInputItemParam)
    others = sample_values(beta.BetaResponseInputItemParam)
    return [with_id(item) for item in stable if not is_model_message(item)] + [
        with_id(item) for item in others if item.get("type") in BETA_ONLY
    ]


def find_error(check: Any, body: Any) -> ApiError | None:
    try:
        check(body)
    except ApiError as error:
        return error
    return None


def list_errors(bodies: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the messages of the errors by the parameters of the request."""
    found = ((body, find_error(requests.check_create, {"model": "m"} | body)) for body in bodies)
    return {json.dumps(body): error.message for body, error in found if error}


def test_every_item_and_tool_type_is_accepted() -> None:
    """All types of items and tools are accepted, with minimal members and with each member and choice."""
    assert {item["type"] for item in list_items() if item.get("type")} == set(ITEM_TYPES)
    assert list_errors({"input": [item]} for item in list_items()) == {}
    assert list_errors({"input": "x", "tools": [tool]} for tool in TOOLS) == {}


def test_server_accepts_every_item_type_on_every_endpoint() -> None:
    """No item type causes a server error on any endpoint, with or without streaming."""
    first = {item["type"]: item for item in list_items() if item.get("type")}
    with serve() as server, open_client(server) as http:
        for item in first.values():
            body = {"model": "practice", "input": [item, {"role": "user", "content": "hi"}]}
            requests_of_item = [
                ("responses", body),
                ("responses", body | {"stream": True}),
                ("responses/input_tokens", body),
                ("responses/compact", body),
                ("conversations", {"items": [item]}),
            ]
            answers = [http.post(f"/v1/{path}", json=sent) for path, sent in requests_of_item]
            assert max(answer.status_code for answer in answers) < 500, item


@for_each(
    ("check", "shape"),
    [
        (requests.check_create, response_create_params.ResponseCreateParamsNonStreaming),
        (requests.check_create, response_create_params.ResponseCreateParamsStreaming),
        (requests.check_input_tokens, input_token_count_params.InputTokenCountParams),
        (requests.check_compact, response_compact_params.ResponseCompactParams),
        (requests.check_conversation_create, conversation_create_params.ConversationCreateParams),
        (requests.check_conversation_items, item_create_params.ItemCreateParams),
    ],
)
def test_every_parameter_is_accepted(check: Any, shape: Any) -> None:
    """Each parameter of each endpoint is accepted with each of its choices, including null."""
    hints = get_type_hints(shape, include_extras=True)
    needed = {"model": "m", "input": "x"} if "input" in hints else {"items": []}
    if shape is conversation_create_params.ConversationCreateParams:
        needed = {}
    for name, hint in hints.items():
        if name in {"input", "items", "tools"}:  # tested above
            continue
        for value in sample_values(hint, name):
            error = find_error(check, needed | {name: value})
            assert error is None, f"{name}={value!r}: {error and error.message}"


FREE_FORM = {
    "metadata", "parameters", "schema", "env", "headers", "attributes", "filters", "output_schema",
    "input_schema",
}  # fmt: skip
MESSAGE = {
    "type": "message", "id": "msg_1", "role": "assistant", "phase": "final_answer",
    "content": [{"type": "output_text", "text": "hello", "annotations": []}], "status": "completed",
}  # fmt: skip
SHELL_CALL = {
    "type": "shell_call", "call_id": "call_2", "environment": {"type": "local"},
    "action": {"commands": ["ls"], "timeout_ms": 10},
}  # fmt: skip
SHELL_RESULT = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
GRAMMAR = {"type": "grammar", "definition": "x", "syntax": "lark"}
FULL_BODY = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
        MESSAGE,
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        SHELL_CALL,
        {"type": "shell_call_output", "call_id": "call_2", "output": [SHELL_RESULT]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": STRICT_SCHEMA, "strict": True},
        {"type": "custom", "name": "g", "format": GRAMMAR},
        {"type": "mcp", "server_label": "s", "require_approval": {"always": {"read_only": True}}},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "context_management": [{"type": "compaction", "compact_threshold": 5_000}],
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "conversation": {"id": "conv_1"},
    "moderation": {"model": "m", "policy": {"input": {"mode": "score"}}},
    "max_output_tokens": 100,
    "temperature": 0.5,
    "include": ["reasoning.encrypted_content"],
}

JsonPath = tuple[str | int, ...]


def json_paths(value: Any, path: JsonPath = ()) -> Iterator[tuple[JsonPath, Any]]:
    """Yield every path and value of a body, except inside free-form values."""
    yield path, value
    if path and path[-1] in FREE_FORM:
        return
    members = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, list) else members:
        yield from json_paths(child, (*path, key))


def format_path(path: JsonPath) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def change_at(path: JsonPath, change: Any) -> dict[str, Any]:
    """Return a copy of the full body, changed at a path."""
    body = copy.deepcopy(FULL_BODY)
    container: Any = body
    for step in path[:-1]:
        container = container[step]
    change(container, path[-1])
    return body


def check_change(path: JsonPath, change: Any, codes: set[str], *reported: JsonPath) -> None:
    """Check that a change of the full body is an error with one of the codes, reported at one of the paths."""
    error = find_error(requests.check_create, change_at(path, change))
    assert error is not None, path
    assert error.code in codes, path
    assert error.param in [format_path(each) for each in reported]


def test_unknown_member_is_rejected_at_any_path() -> None:
    """An unknown member at any position of a valid body is reported with its full path."""
    requests.check_create(FULL_BODY)
    for at, value in json_paths(FULL_BODY):
        if isinstance(value, dict) and not (at and at[-1] in FREE_FORM):
            path = (*at, "zzz")
            check_change(
                path, lambda owner, key: owner.update({key: 1}), {"unknown_parameter"}, path
            )


def test_wrong_type_is_rejected_at_any_path() -> None:
    """A value of a wrong type is reported with its path or with that of its parent."""
    codes = {"invalid_type", "invalid_value"}
    for at in [at for at, _ in json_paths(FULL_BODY) if at]:
        paths = (at, at[:-1], (*at, 0))
        check_change(at, lambda owner, key: owner.__setitem__(key, [[3.5]]), codes, *paths)


names = st.sampled_from(
    ["type", "role", "content", "id", "text", "call_id", "name", "format", "tools", "x"]
) | st.text(st.characters(codec=None), max_size=4)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**30, 10**60)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(["message", "user", "function_call", "input_text", "function", "auto", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
CHECKS = [
    requests.check_create, requests.check_input_tokens, requests.check_compact,
    requests.check_conversation_create, requests.check_conversation_update,
    requests.check_conversation_items,
]  # fmt: skip


def is_serializable(error: ApiError | None) -> bool:
    return error is None or bool(json.dumps(error.body(), ensure_ascii=False).encode())


@given(body=values, check=st.sampled_from(CHECKS))
def test_any_json_is_accepted_or_rejected(body: Any, check: Any) -> None:
    """No JSON value raises another error, and every error can be serialized."""
    assert is_serializable(find_error(check, body))


@given(data=st.data(), value=values)
def test_any_changed_request_is_accepted_or_rejected(data: st.DataObject, value: Any) -> None:
    """No replaced value in a request raises another error, and every error can be serialized."""
    at = data.draw(st.sampled_from([at for at, _ in json_paths(FULL_BODY) if at]))
    body = change_at(at, lambda container, key: container.__setitem__(key, value))
    assert is_serializable(find_error(requests.check_create, body))
