"""Helpers for programs that resend their history, and for the requests that the server recorded."""

import json
from typing import Any

from openai import OpenAI

from kedge.testing import TestServer
from normalization import normalize_items

URL = "https://api.openai.com/v1"
TEXT = {"type": "output_text", "text": "Hello", "annotations": []}
OUTPUT = [{"id": "m", "type": "message", "role": "assistant", "content": [TEXT]}]
HISTORY = [{"role": "user", "content": "One"}, *OUTPUT, {"role": "user", "content": "Two"}]
"""A message, the answer of a server without a model, and the next message."""


def message(text: str, role: str = "user") -> dict[str, Any]:
    """Return an input message as programs write it."""
    return {"role": role, "content": text}


def replay(response: Any) -> list[dict[str, Any]]:
    """Return the output of a response as programs resend it."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def ask(
    client: OpenAI, history: list[Any], text: str, *, streaming: bool = False, **options: Any
) -> Any:
    """Add a message to the history, send the complete history, and add the output."""
    history.append(message(text))
    body: Any = {"model": "practice", "input": history, **options}
    if streaming:
        with client.responses.stream(**body) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**body)
    history += replay(response)
    return response


def check_contexts(server: TestServer, sent: list[list[Any]]) -> None:
    """Check that the context of each answered request is the history that the program sent."""
    contexts = [request.context for request in server.requests if request.context is not None]
    assert [normalize_items(each) for each in contexts] == [normalize_items(typed(x)) for x in sent]


def typed(items: list[Any]) -> list[Any]:
    return [{"type": "message", **item} if "role" in item else item for item in items]


def bodies(server: TestServer) -> list[dict[str, Any]]:
    """Return the bodies that the server received."""
    return [json.loads(request.raw) for request in server.requests if request.raw]
