"""Fixtures: a server on a real socket, the official client, and validators for its responses."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openresponses_types as spec
import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI
from openai.types.responses import ResponseStreamEvent
from openresponses_types import ResponseResource
from pydantic import TypeAdapter

from kedge.server.models import PracticeModel
from kedge.server.practice_model import Script
from kedge.server.prepare import ResponseDraft, build_draft, resolve_request
from kedge.server.state import ServerState
from kedge.testing import TestServer
from server.gated_model import GatedModel
from server.waiting import TIMEOUT

CheckEvent = Callable[[dict[str, Any]], None]
CheckResponse = Callable[[Any], dict[str, Any]]
Connect = Callable[[TestServer], OpenAI]
Scripted = Callable[..., PracticeModel]
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="session")
def transport() -> Iterator[httpx2.Client]:
    """Yield the HTTP client shared by all OpenAI clients: creating a TLS context is slow."""
    with httpx2.Client(timeout=TIMEOUT) as http_client:
        yield http_client


@pytest.fixture
def connect(transport: httpx2.Client) -> Connect:
    """Return a function that creates the official client for a server."""

    def make_client(server: TestServer) -> OpenAI:
        return OpenAI(base_url=server.base_url, api_key="any", max_retries=0, http_client=transport)

    return make_client


@pytest.fixture
def client(server: TestServer, connect: Connect) -> OpenAI:
    """Return the official client, connected to the server."""
    return connect(server)


def open_client(server: TestServer, **headers: str) -> httpx2.Client:
    """Return a plain HTTP client of a server."""
    return httpx2.Client(base_url=server.url, verify=False, timeout=TIMEOUT, headers=headers)


@pytest.fixture
def http(server: TestServer) -> Iterator[httpx2.Client]:
    """Yield a plain HTTP client, for requests that the official client does not send."""
    with open_client(server) as http_client:
        yield http_client


def ask(client: OpenAI | AsyncOpenAI, prompt: Any, previous: str | None = None, **more: Any) -> Any:
    """Create a response, which continues another one if its id is given."""
    if previous is not None:
        more["previous_response_id"] = previous
    create: Any = client.responses.create
    return create(model="practice", input=prompt, **more)


def user_message(text: str) -> Any:
    """Return an input item."""
    return {"role": "user", "content": text}


def list_texts(server: TestServer) -> list[str]:
    """Return the texts of the messages that the model saw last."""
    items = server.requests[-1].context or ()
    return [item["content"][0]["text"] for item in items if item["type"] == "message"]


def prepare_draft(service: ServerState, body: dict[str, Any]) -> ResponseDraft:
    """Prepare the response to a valid request."""
    resolved = resolve_request(service, body, service.nodes.new_key)
    return build_draft(service, body, resolved)


def count_nodes(service: ServerState) -> int:
    """Return the number of nodes in a database."""
    return service.nodes._execute("SELECT count(*) FROM kedge_server_nodes").fetchone()[0]


def parse_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream as they arrive."""
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def rejects(
    code: str | None, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[APIStatusError]]:
    """Expect that the official client raises an error with a code."""
    with pytest.raises(APIStatusError, match=match) as exc_info:
        yield exc_info
    assert exc_info.value.code == code


@pytest.fixture
def model() -> GatedModel:
    """Return a model that continues when the test allows it."""
    return GatedModel()


@pytest.fixture
def scripted() -> Scripted:
    """Return a function that creates a model with scripted answers."""

    def make(*answers: dict[str, Any], **options: Any) -> PracticeModel:
        return PracticeModel(Script.from_data({"answers": list(answers)}), **options)

    return make


def check_response_object(body: dict[str, Any]) -> dict[str, Any]:
    """Validate a response body against the Open Responses schema."""
    copy = dict(body)
    form = copy["text"]["format"]
    if form["type"] == "json_schema":
        # The schema package accepts only null for this member, which no server can send.
        copy["text"] = {**copy["text"], "format": {**form, "schema": None}}
    # It accepts only function tools and their items.
    copy["tools"] = [tool for tool in copy["tools"] if tool["type"] == "function"]
    copy["output"] = [item for item in copy["output"] if item["type"] != "custom_tool_call"]
    ResponseResource.model_validate(copy)
    return body


HOSTED_ONLY = {
    "error",  # flat in the hosted API, nested in the specification
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.compaction.compacting",
}
"""Events of the hosted API that are missing from the specification or differ from it."""

HOSTED_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def check_event() -> CheckEvent:
    """Return a function that validates a stream event against both schemas."""

    def check(event: dict[str, Any]) -> None:
        HOSTED_EVENTS.validate_python(event)
        if "response" in event:
            check_response_object(event["response"])
        elif event["type"] not in HOSTED_ONLY and "ctc_" not in str(event):
            words = re.split(r"[._]", event["type"].replace("summary_text", "summary"))
            name = "".join(word.title() for word in words)
            getattr(spec, f"{name}StreamingEvent").model_validate(event)

    return check


@pytest.fixture
def checked() -> CheckResponse:
    """Return a function that validates a raw response of the official client and returns its body."""

    def check(raw: Any) -> dict[str, Any]:
        assert raw.parse().id
        return check_response_object(raw.http_response.json())

    return check
