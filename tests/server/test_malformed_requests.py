"""Malformed requests to the stateless endpoints are accepted or rejected with an API error."""

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.server.errors import ApiError
from kedge.server.routes import chat_requests as chat
from kedge.server.routes import message_requests as messages
from kedge.server.routes.message_errors import error_body
from strategies import scale_examples

FUNCTION = {"name": "f", "arguments": "{}"}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "5"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "stop": ["a"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": ""}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
RESULTS = [
    {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]},
    {"type": "document", "source": PDF},
]
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Well"}, TOOL_USE]},
        {"role": "user", "content": RESULTS},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["a"],
}
JUNK: list[Any] = [None, True, 0, -1, 1.5, "", "x", "auto", [], [None], {}, {"type": "x"}]


def json_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path within a JSON value."""
    members = value.items() if isinstance(value, dict) else ()
    members = enumerate(value) if isinstance(value, list) else members
    return [path, *(each for key, one in members for each in json_paths(one, (*path, key)))]


def damage(body: Any, path: tuple[Any, ...], junk: Any, *, remove: bool) -> Any:
    """Return a copy of the body with the value at one path replaced or removed."""
    if not path:
        return junk
    body = copy.deepcopy(body)
    container = body
    for key in path[:-1]:
        container = container[key]
    if remove:
        del container[path[-1]]
    else:
        container[path[-1]] = copy.deepcopy(junk)
    return body


def parse_message(body: Any) -> dict[str, Any]:
    return messages.parse_request(body, lambda _: None)


def check_parse(parse: Any, body: Any) -> None:
    """Check that a body is accepted and serializable, or rejected with an API error."""
    error = None
    try:
        json.dumps(parse(body))
    except ApiError as raised:
        error = raised
    if error is not None:
        assert 400 <= error.status < 500
        json.dumps(error.body())
        message = error_body(error, None)["error"]["message"]
        assert message
        assert "{" not in message or "{" in json.dumps(body)


PARSERS: list[tuple[Any, Any]] = [(chat.parse_request, CHAT), (parse_message, MESSAGE)]
damages = st.sampled_from(
    [(parse, body, path) for parse, body in PARSERS for path in json_paths(body)]
)


@settings(max_examples=scale_examples(300))
@given(damaged=damages, junk=st.sampled_from(JUNK), remove=st.booleans())
def test_damaged_request_is_accepted_or_rejected(damaged: Any, junk: Any, remove: bool) -> None:
    """A request of which one part is replaced or removed raises only API errors."""
    parse, body, path = damaged
    check_parse(parse, damage(body, path, junk, remove=remove))


def test_undamaged_requests_are_accepted() -> None:
    """The requests that the other test damages are valid."""
    assert [len(parse(body)["input"]) for parse, body in PARSERS] == [5, 5]
