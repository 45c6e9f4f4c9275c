"""What programs do that replay their history, and what the server saw of it."""

import json
from typing import Any

from openai import OpenAI

from kedge.testing import TestServer
from normalization import normalize_items


def message(text: str, role: str = "user") -> dict[str, Any]:
    """An input message as programs write it."""
    return {"role": role, "content": text}


def replay(response: Any) -> list[dict[str, Any]]:
    """The output of a response as programs send it back."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def ask(client: OpenAI, history: list[Any], text: str, **options: Any) -> Any:
    """Add a message to the history, send all of it, and add the output."""
    history.append(message(text))
    response = client.responses.create(model="practice", input=history, **options)
    history += replay(response)
    return response


def check_contexts(server: TestServer, sent: list[list[Any]]) -> None:
    """For each answered request, the model saw exactly the history that the program wrote."""
    seen = [request.context for request in server.requests if request.context is not None]
    assert [normalize_items(each) for each in seen] == [normalize_items(typed(x)) for x in sent]


def typed(items: list[Any]) -> list[Any]:
    return [{"type": "message", **item} if "role" in item else item for item in items]


def bodies(server: TestServer) -> list[dict[str, Any]]:
    """The bodies that reached the server."""
    return [json.loads(request.raw) for request in server.requests if request.raw]
