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
from server.routes.chat_completions.test_parse import VALID_REQUESTS as CHATS
from server.routes.messages.test_parse import VALID_REQUESTS as MESSAGES
from strategies import scale_examples

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


BODIES: list[tuple[Any, Any]] = [
    *((chat.parse_request, body) for body in CHATS),
    *((parse_message, body) for body in MESSAGES),
]
damages = st.sampled_from(
    [(parse, body, path) for parse, body in BODIES for path in json_paths(body)]
)


@settings(max_examples=scale_examples(300))
@given(damaged=damages, junk=st.sampled_from(JUNK), remove=st.booleans())
def test_damaged_request_is_accepted_or_rejected(damaged: Any, junk: Any, remove: bool) -> None:
    """A request of which one part is replaced or removed raises only API errors."""
    parse, body, path = damaged
    check_parse(parse, damage(body, path, junk, remove=remove))
