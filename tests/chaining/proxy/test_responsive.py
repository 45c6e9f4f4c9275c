"""An upstream that keeps the proxy busy: other requests are answered meanwhile."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chaining.proxy.running import open_store, serve_proxy
from kedge.store import TokenRegistry

TIMEOUT = 300.0
MAX_CHUNKS = 2_000_000
"""The chunks after which an upstream ends, so that a test of a blocked proxy fails instead of waiting forever."""
CREATED = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}


class TirelessUpstream(httpx2.AsyncBaseTransport):
    """An upstream that never waits: it sends the same chunk until the test has seen enough."""

    def __init__(self, chunk: bytes, **headers: str) -> None:
        self.chunk = chunk
        self.headers = {"content-type": "text/event-stream", **headers}
        self.has_begun = threading.Event()
        self.enough = threading.Event()
        self.was_stopped = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer with a stream."""
        return httpx2.Response(200, headers=self.headers, stream=TirelessStream(self))


class TirelessStream(httpx2.AsyncByteStream):
    """The body of an answer of such an upstream."""

    def __init__(self, upstream: TirelessUpstream) -> None:
        self._upstream = upstream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._upstream.has_begun.set()
        chunks = 0
        while not self._upstream.enough.is_set() and chunks < MAX_CHUNKS:
            yield self._upstream.chunk
            chunks += 1
        self._upstream.was_stopped = self._upstream.enough.is_set()


def encode_event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


CHUNKS = {
    "events": (encode_event(CREATED), {}),
    "comments": (b": still here\n\n", {}),
    "compressed": (gzip.compress(b": \n" * 100_000), {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", CHUNKS)
def test_an_upstream_that_never_waits_does_not_stop_other_requests(path: str, kind: str) -> None:
    """The proxy answers while it passes a stream on, whether it reads it or not."""
    chunk, headers = CHUNKS[kind]
    upstream = TirelessUpstream(chunk, **headers)
    client = httpx2.AsyncClient(transport=upstream)
    with (
        serve_proxy("http://upstream/v1", client=client) as url,
        httpx2.Client(base_url=url, timeout=TIMEOUT) as http,
    ):
        reader = threading.Thread(target=read_stream, args=(url, path))
        reader.start()
        assert upstream.has_begun.wait(TIMEOUT)
        assert http.get("/healthz").status_code == 200
        upstream.enough.set()
        reader.join(TIMEOUT)
    assert upstream.was_stopped


def read_stream(url: str, path: str, **headers: str) -> None:
    """Request a stream and read it to its end."""
    body = {"model": "m", "input": "Hello", "stream": True}
    with (
        httpx2.Client(base_url=url, timeout=TIMEOUT, headers=headers) as http,
        http.stream("POST", path, json=body) as answer,
    ):
        for _ in answer.iter_raw():
            pass


def test_counting_the_tokens_of_a_stream_does_not_stop_other_requests(tmp_path: Path) -> None:
    """The stream of a user with a limit is read on the way, also if it is compressed well."""
    chunk, encoding = CHUNKS["compressed"]
    upstream = TirelessUpstream(chunk, **encoding)
    client = httpx2.AsyncClient(transport=upstream)
    with open_store(tmp_path) as store:
        _, token = asyncio.run(TokenRegistry(store).add("ada", tokens_per_minute=10**9))
        with (
            serve_proxy("http://upstream/v1", client=client, store=store) as url,
            httpx2.Client(base_url=url, timeout=TIMEOUT) as http,
        ):
            headers = {"x-kedge-token": token}
            path = "/v1/chat/completions"
            reader = threading.Thread(target=read_stream, args=(url, path), kwargs=headers)
            reader.start()
            assert upstream.has_begun.wait(TIMEOUT)
            assert http.get("/healthz").status_code == 200
            upstream.enough.set()
            reader.join(TIMEOUT)
    assert upstream.was_stopped
