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

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
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
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2000,
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Well"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "image", "source": {"type": "url", "url": "u"}}],
                },
                {
                    "type": "document",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
                },
            ],
        },
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


@settings(max_examples=scale_examples(150))
@given(path=st.sampled_from(json_paths(CHAT)), junk=st.sampled_from(JUNK), remove=st.booleans())
def test_damaged_chat_is_accepted_or_rejected(path: Any, junk: Any, remove: bool) -> None:
    """A chat request with one part replaced or removed raises only API errors."""
    check_parse(chat.parse_request, damage(CHAT, path, junk, remove=remove))


@settings(max_examples=scale_examples(150))
@given(path=st.sampled_from(json_paths(MESSAGE)), junk=st.sampled_from(JUNK), remove=st.booleans())
def test_damaged_message_is_accepted_or_rejected(path: Any, junk: Any, remove: bool) -> None:
    """A message request with one part replaced or removed raises only API errors."""
    check_parse(
        lambda body: messages.parse_request(body, lambda _: None),
        damage(MESSAGE, path, junk, remove=remove),
    )


def check_parse(read: Any, body: Any) -> None:
    error = find_error(read, body)
    if error is None:
        return
    assert 400 <= error.status < 500
    json.dumps(error.body())
    message = error_body(error, None)["error"]["message"]
    assert message
    assert "{" not in message or "{" in json.dumps(body)


def find_error(read: Any, body: Any) -> ApiError | None:
    """Return the error of a rejected request, or None if it is accepted and serializable."""
    try:
        question = read(body)
    except ApiError as error:
        return error
    json.dumps(question)
    return None


def test_undamaged_requests_are_accepted() -> None:
    """The requests that the other tests damage are valid."""
    assert len(chat.parse_request(CHAT)["input"]) == 5
    assert len(messages.parse_request(MESSAGE, lambda _: None)["input"]) == 5
