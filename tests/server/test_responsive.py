"""Requests that keep the server busy: others are answered meanwhile."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    PracticeModel,
    Prompt,
)
from kedge.testing import TestServer, serve
from server.conftest import open_client
from server.waiting import TIMEOUT, wait_until

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
