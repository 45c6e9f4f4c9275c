"""Requests that keep the server busy: others are answered meanwhile."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge._internal.json_text import decode
from kedge.server import http as server_http
from kedge.server import websocket
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    PracticeModel,
    Prompt,
)
from kedge.server.storage import items as stored_items
from kedge.testing import TestServer, serve
from server.conftest import open_client
from server.waiting import TIMEOUT, SlowCall, wait_until, wait_until_async
from server.websocket_client import connect_client

MAX_DELTAS = 3_000_000
"""The deltas after which a tireless model ends, so that a test of a blocked server fails instead of waiting forever."""


class TirelessModel(PracticeModel):
    """A model that never waits: it writes until the test has seen enough."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.enough = threading.Event()
        self.was_stopped = True

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield deltas."""
        self.running += 1
        yield ItemOpened("text")
        deltas = 0
        while not self.enough.is_set() and deltas < MAX_DELTAS:
            yield ItemDelta("word ")
            deltas += 1
        self.was_stopped = self.enough.is_set() and self.was_stopped
        yield ItemClosed()


REQUESTS: dict[str, Any] = {
    "/v1/responses": {"model": "m", "input": "Hello"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 1_000,
        "messages": [{"role": "user", "content": "Hello"}],
    },
}


@contextmanager
def send_meanwhile(server: TestServer, path: str, number: int = 1, **body: Any) -> Iterator[None]:
    """Send requests from threads of their own, which read the answers to their end."""

    def send() -> None:
        with open_client(server, **{"anthropic-version": "2023-06-01"}) as http:
            assert http.post(path, json={**REQUESTS[path], **body}).status_code == 200

    threads = [threading.Thread(target=send) for _ in range(number)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(TIMEOUT)


def check_health(http: httpx2.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_model_that_never_waits_does_not_stop_other_requests(path: str, stream: bool) -> None:
    """Other requests are answered while it writes."""
    model = TirelessModel()
    with serve(model=model) as server, open_client(server) as http:
        with send_meanwhile(server, path, stream=stream):
            wait_until(lambda: model.running)
            check_health(http)
            model.enough.set()
        assert model.was_stopped


def test_a_tireless_background_response_does_not_stop_other_requests() -> None:
    """A response in the background shares the loop as well, and can be cancelled."""
    model = TirelessModel()
    body = {**REQUESTS["/v1/responses"], "background": True}
    with serve(model=model) as server, open_client(server) as http:
        response = http.post("/v1/responses", json=body).json()
        wait_until(lambda: model.running)
        cancelled = http.post(f"/v1/responses/{response['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"
        assert model.was_stopped
        model.enough.set()


def test_several_models_that_never_wait_share_the_server() -> None:
    """With many of them at once, a request still needs few of their turns."""
    model = TirelessModel()
    with serve(model=model) as server, open_client(server) as http:
        with send_meanwhile(server, "/v1/responses", number=5, stream=True):
            wait_until(lambda: model.running == 5)
            check_health(http)
            model.enough.set()
        assert model.was_stopped


def build_large_body(path: str) -> dict[str, Any]:
    """Return a valid request of more than a megabyte."""
    text = "word " * 210_000
    if path == "/v1/responses":
        return {"model": "m", "input": text, "truncation": "auto"}
    return {**REQUESTS[path], "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", REQUESTS)
def test_large_bodies_are_parsed_and_checked_beside_other_requests(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a megabyte, neither the parser nor the validators stop the loop."""
    slow_parser = SlowCall(server_http.parse_body)
    slow_check = SlowCall(server_http._check_body)
    monkeypatch.setattr(server_http, "parse_body", slow_parser)
    monkeypatch.setattr(server_http, "_check_body", slow_check)
    with (
        serve() as server,
        open_client(server) as http,
        send_meanwhile(server, path, **build_large_body(path)),
    ):
        for slow in (slow_parser, slow_check):
            wait_until(slow.started.is_set)
            check_health(http)
            slow.may_end.set()
    assert slow_parser.was_stopped
    assert slow_check.was_stopped


async def test_large_websocket_messages_are_parsed_beside_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message of a WebSocket is parsed twice, each time in a thread."""
    slow_parser = SlowCall(websocket.parse_body)
    monkeypatch.setattr(websocket, "parse_body", slow_parser)
    with serve() as server, open_client(server) as http:
        async with connect_client(server) as client:
            await client.create("word " * 210_000, truncation="auto")
            await wait_until_async(slow_parser.started.is_set)
            await asyncio.to_thread(check_health, http)
            slow_parser.may_end.set()
            assert (await client.read_response())[-1]["type"] == "response.completed"
    assert slow_parser.was_stopped


LETTER = {"role": "user", "content": "x"}
PART = {"type": "input_text", "text": "x"}
TOO_MANY_ITEMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": [LETTER] * 20_001}, "input"),
    ("/v1/responses/input_tokens", {"input": [LETTER] * 20_001}, "input"),
    ("/v1/responses/compact", {"model": "m", "input": [LETTER] * 20_001}, "input"),
    ("/v1/conversations", {"items": [LETTER] * 20_001}, "items"),
    ("/v1/chat/completions", {"model": "m", "messages": [LETTER] * 20_001}, "messages"),
    ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": [LETTER] * 20_001}, "messages"),
    (
        "/v1/responses",
        {"model": "m", "input": [LETTER, {"role": "user", "content": [PART] * 20_001}]},
        "input[1].content",
    ),
    ("/v1/responses", {"model": "m", "input": [], "unknown": [1] * 300_000}, "unknown"),
]


@for_each(("path", "body", "param"), TOO_MANY_ITEMS)
def test_too_many_items_are_the_first_error(
    http: httpx2.Client, path: str, body: dict[str, Any], param: str
) -> None:
    """The error names the limit, before a missing model or any check of an item."""
    answer = http.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert error["message"].startswith("messages: List should have at most 20000 items")
    else:
        assert error["param"] == param
        assert error["code"] == "array_above_max_length"
        assert f"Invalid '{param}'" in error["message"]
        assert "maximum length 20000" in error["message"]


def test_the_largest_number_of_items_is_accepted(http: httpx2.Client) -> None:
    """A request may have 20,000 items, and the model sees all of them."""
    body = {"model": "m", "input": [*[LETTER] * 19_999, {"role": "user", "content": "Hello"}]}
    response = http.post("/v1/responses", json=body).json()
    assert "I can see 20000 messages" in response["output"][0]["content"][0]["text"]


def test_a_body_with_too_many_values_is_rejected(http: httpx2.Client) -> None:
    """Values that no list limits are counted before any of them is created."""
    tool = {"type": "function", "name": "f", "parameters": {"a": [[1] * 10_000] * 101}}
    body = {"model": "m", "input": "Hello", "tools": [tool]}
    answer = http.post("/v1/responses", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "too_many_values"
    assert "more than 1000000 JSON values" in error["message"]


JSON = {"content-type": "application/json"}


def test_the_oldest_exchanges_of_many_are_dropped(http: httpx2.Client) -> None:
    """Truncation takes one pass over the items, and the newest that fit remain."""
    text = "word " * 100
    items = [{"role": "user", "content": text}] * 9_999
    body = {
        "model": "m",
        "truncation": "auto",
        "input": [*items, {"role": "user", "content": "Hello"}],
    }
    answer = http.post("/v1/responses", json=body).json()
    seen = answer["usage"]["input_tokens"]
    assert 399_800 < seen <= 400_000
    assert (
        f"I can see {(seen - 5) // 105 + 1} messages" in answer["output"][0]["content"][0]["text"]
    )


def test_each_stored_node_is_decoded_once_for_a_request(
    server: TestServer, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References to many items of one response cost one pass over it, and so do its items with their ids."""
    items = [*[LETTER] * 200, {"role": "assistant", "content": "y"}, LETTER]
    first = http.post("/v1/responses", json={"model": "m", "input": items}).json()
    listed = http.get(f"/v1/responses/{first['id']}/input_items?limit=100").json()["data"]
    decoded: list[int] = []

    def count_decoded(data: bytes) -> Any:
        decoded.append(len(data))
        return decode(data)

    monkeypatch.setattr(stored_items, "decode", count_decoded)
    references = [{"type": "item_reference", "id": item["id"]} for item in listed]
    body = {"model": "m", "input": [*references, *first["output"], LETTER]}
    response = http.post("/v1/responses", json=body).json()
    assert "I can see 102 messages" in response["output"][0]["content"][0]["text"]
    assert len(decoded) == 2


def test_many_tools_can_be_allowed(http: httpx2.Client) -> None:
    """Each allowed tool is looked up among the tools of the request, and the first unknown one is an error."""
    tools = [{"type": "function", "name": f"f{number}"} for number in range(5_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    body = {"model": "m", "input": "Hello", "tools": tools, "tool_choice": choice}
    assert http.post("/v1/responses", json=body).status_code == 200
    answer = http.post("/v1/responses", json={**body, "tools": tools[:-1]})
    assert "f4999" in answer.json()["error"]["message"]
