"""Tests of `kedge proxy` with clients and a server over HTTP."""

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx2
import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI, BadRequestError, OpenAI
from starlette.types import Message, Scope

from chaining.proxy.running import open_asgi, open_store, serve_proxy
from kedge.chaining import MemoryIndex
from kedge.chaining.proxy import app
from kedge.cli import group
from kedge.store import Store
from kedge.testing import TestServer
from recordings.check_recordings import check
from recordings.exchanges import read_folder
from server.waiting import wait_until

JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture
def proxy(server: TestServer) -> Iterator[str]:
    """Yield the URL of a proxy in front of the server."""
    with serve_proxy(server.base_url) as url:
        yield url


def open_client(proxy: str, key: str = "k") -> OpenAI:
    return OpenAI(base_url=f"{proxy}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(proxy: str) -> Iterator[OpenAI]:
    """Yield a client of the proxy."""
    with open_client(proxy) as openai_client:
        yield openai_client


def send(client: OpenAI, history: list[Any], text: str, **options: Any) -> str:
    """Resend the history with a new message and return the answer."""
    history.append({"role": "user", "content": text})
    response = client.responses.create(model="practice", input=history, **options)
    history += [item.model_dump(exclude_none=True) for item in response.output]
    return response.output_text


def input_sizes(server: TestServer) -> list[int]:
    """Return the number of items of each request to the upstream."""
    return [len(json.loads(request.raw)["input"]) for request in server.requests if request.raw]


def test_a_replayed_history_becomes_incremental(server: TestServer, client: OpenAI) -> None:
    """The upstream receives deltas, also of a stream."""
    history: list[Any] = []
    send(client, history, "My name is Ada.")
    assert send(client, history, "What is my name?") == "Your name is Ada."
    with client.responses.stream(
        model="practice", input=[*history, {"role": "user", "content": "Count to 3"}]
    ) as events:
        assert events.get_final_response().output_text == "1 2 3"
    assert input_sizes(server) == [1, 1, 1]


def test_the_report_has_each_request(proxy: str, client: OpenAI) -> None:
    """Requests are counted, and listed with their model and why they were sent as written."""
    history: list[Any] = []
    send(client, history, "My name is Ada.")
    send(client, history, "What is my name?")
    body = r'{"model": "\ud800", "input": "hello"}'  # half of a character, which is no UTF-8
    httpx2.post(f"{proxy}/v1/responses", content=body, headers=JSON_TYPE)
    report = httpx2.get(f"{proxy}/report").json()
    assert (report["requests"], report["chained"]) == (3, 1)
    assert [row["model"] for row in report["recent"]] == ["practice", "practice", "\ud800"]
    assert report["recent"][0]["reason"] == "new"


def test_logs_and_metrics_have_no_content(
    proxy: str, client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """They say how a request was sent."""
    with caplog.at_level("INFO", logger="kedge.access"):
        send(client, [], "My name is Ada.")
        wait_until(lambda: re.search("POST /v1/responses 200 .*new chain; ", caplog.text))
    metrics = httpx2.get(f"{proxy}/metrics").text
    assert "responses_passed_through_total" in metrics
    assert "Ada" not in caplog.text + metrics


def test_a_body_without_a_length_becomes_incremental(
    server: TestServer, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunked body is read up to the size that is examined, and a header describes its plan."""
    history = [{"role": "user", "content": "One"}]

    def post() -> httpx2.Response:
        body = json.dumps({"model": "practice", "input": history}).encode()
        headers = {**JSON_TYPE, "authorization": "Bearer k"}
        chunks = iter([body[:50], body[50:]])
        return httpx2.post(f"{proxy}/v1/responses", content=chunks, headers=headers)

    first = post()
    assert first.headers["x-kedge-plan"].startswith("new chain; ")
    history += [*first.json()["output"], {"role": "user", "content": "Two"}]
    assert post().headers["x-kedge-plan"].startswith("chained; sent=")
    server.forget()
    assert post().headers["x-kedge-plan"].startswith("sent in full; ")
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 100)
    large = post()
    assert (large.status_code, "x-kedge-plan" in large.headers) == (200, False)
    sizes = input_sizes(server)
    assert sizes == [1, 1, 1, len(history), len(history)]  # the third was rejected


def test_other_routes_and_errors_are_forwarded(client: OpenAI) -> None:
    """Retrieval, deletion, chat completions and errors are those of the upstream."""
    response = client.responses.create(model="practice", input="Hello")
    assert client.responses.retrieve(response.id).id == response.id
    client.responses.delete(response.id)
    chat: Any = [{"role": "user", "content": "What is 2+3?"}]
    completion = client.chat.completions.create(model="practice", messages=chat)
    assert completion.choices[0].message.content == "2+3 = 5."
    with pytest.raises(BadRequestError, match="temperature"):
        client.responses.create(model="practice", input="Hello", temperature=9)


def use_proxy(server: TestServer, store: Store) -> None:
    """Send a new chain, a chained request, one that is healed, and one that the server refuses."""
    with serve_proxy(server.base_url, store=store) as proxy, open_client(proxy) as client:
        history: list[Any] = []
        send(client, history, "My name is Ada.")
        send(client, history, "Say 2")
        server.forget()
        send(client, history, "Say 3")
        with pytest.raises(BadRequestError):
            client.responses.create(model="practice", input="Hello", temperature=9)


async def test_each_request_on_the_wire_is_recorded_in_the_store(
    server: TestServer, tmp_path: Path
) -> None:
    """The newest record is first; it has the plan, the status, and the error of the server."""
    with open_store(tmp_path) as store:
        use_proxy(server, store)
        rows = await store.list_proxied()
    assert [(row.plan, row.status, row.healed, row.error_code) for row in rows] == [
        ("refused", 400, "", "decimal_above_max_value"),
        ("sent in full", 200, "rejected", ""),
        ("refused", 400, "", "previous_response_not_found"),
        ("chained", 200, "", ""),
        ("new chain", 200, "", ""),
    ]
    assert "temperature" in rows[0].error
    assert "not found" in rows[2].error
    assert [row.error for row in rows if not row.error_code] == ["", "", ""]


async def test_totals_are_sums_over_the_records(server: TestServer, tmp_path: Path) -> None:
    """What the program wrote counts once for a request that was healed."""
    with open_store(tmp_path) as store:
        use_proxy(server, store)
        rows = await store.list_proxied()
        totals = await store.sum_proxied()
    assert (totals.requests, totals.chained, totals.refused, totals.healed) == (4, 1, 2, 1)
    assert totals.sent_bytes == sum(row.sent_bytes for row in rows)
    assert totals.full_bytes == sum(row.full_bytes for row in rows if not row.is_resent)


async def test_content_is_recorded_only_if_bodies_are_stored(
    server: TestServer, tmp_path: Path
) -> None:
    """By default a record has no content."""
    with open_store(tmp_path, keep_bodies=False) as store:
        use_proxy(server, store)
        for row in await store.list_proxied():
            record = await store.get_proxied(row.id)
            assert (record.request, record.response) == (None, None)


async def test_stored_bodies_are_those_on_the_wire(server: TestServer, tmp_path: Path) -> None:
    """A request that was healed has the body on the anchor, and its rejection."""
    with open_store(tmp_path, keep_bodies=True) as store:
        use_proxy(server, store)
        rows = await store.list_proxied()
        first = await store.get_proxied(rows[-1].id)
        rejected = await store.get_proxied(rows[2].id)
    assert b"Ada" in (first.request or b"")
    assert b"Ada" in (first.response or b"")
    assert b"previous_response_id" in (rejected.request or b"")
    assert b"not found" in (rejected.response or b"")


def test_stored_bodies_are_exported_as_recordings(server: TestServer, tmp_path: Path) -> None:
    """Traffic through the proxy becomes lines that ``make test-recordings`` replays without differences."""
    with (
        open_store(tmp_path, keep_bodies=True) as store,
        serve_proxy(server.base_url, store=store) as proxy,
        open_client(proxy) as client,
    ):
        history: list[Any] = []
        send(client, history, "My name is Ada.")
        send(client, history, "Say 2")
        httpx2.post(f"{proxy}/v1/responses", content=b"{", headers={"content-type": "text/plain"})
    folder = tmp_path / "recordings"
    folder.mkdir()
    options = ["--store", f"sqlite:///{tmp_path}/store.db", "--out", str(folder / "own.jsonl")]
    result = CliRunner().invoke(group, ["export", "--proxied", *options, "--json"])
    assert json.loads(result.output)["requests"] == 2
    first, second = read_folder(folder)
    assert (first.host, first.status, first.is_answer) == ("127.0.0.1", 200, True)
    assert first.group == second.group
    assert first.request["input"][0]["content"] == "My name is Ada."
    assert asyncio.run(check([first, second])).differences == []


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "broken"])
async def test_compressed_responses_are_recorded_as_text(tmp_path: Path, coding: str) -> None:
    """The client gets the compressed bytes; the beginning of the text is stored, if it can be read."""
    text = json.dumps({"output": "Hello " * 1000}).encode()
    body = {"gzip": gzip.compress(text), "deflate": zlib.compress(text)}.get(coding.lower(), text)
    headers = {"content-encoding": "gzip" if coding == "broken" else coding}

    async def read() -> AsyncIterator[bytes]:
        yield body[:20]
        yield body[20:]

    def respond(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=read(), headers=headers)

    with open_store(tmp_path, keep_bodies=True) as store:
        async with (
            open_asgi(respond, store=store) as client,
            client.stream("POST", "/v1/responses", json={"input": "Hello"}) as answer,
        ):
            assert b"".join([chunk async for chunk in answer.aiter_raw()]) == body
        [row] = await store.list_proxied()
        stored = (await store.get_proxied(row.id)).response
    assert stored == (b"" if coding == "broken" else text)


async def test_requests_without_a_response_are_recorded(tmp_path: Path) -> None:
    """An upstream that cannot be reached, and a client that leaves, have a status of the proxy."""
    client_left = asyncio.Event()

    async def respond(request: httpx2.Request) -> httpx2.Response:
        if b"wait" in request.content:
            client_left.set()
            await asyncio.Event().wait()
        raise httpx2.ConnectError("refused")

    async def receive() -> Message:
        if not messages:
            await client_left.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    upstream = httpx2.AsyncClient(transport=httpx2.MockTransport(respond))
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/responses",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-length", b"16")],
    }
    with open_store(tmp_path, keep_bodies=True) as store:
        proxy = app.create_proxy_app("http://upstream/v1", store=store, client=upstream)
        async with proxy.router.lifespan_context(proxy):
            for content in (b'{"input":"left"}', b'{"input":"wait"}'):
                messages: list[Message] = [{"type": "http.request", "body": content}]
                await proxy(dict(scope), receive, AsyncMock())
        rows = await store.list_proxied()
        bodies = [(await store.get_proxied(row.id)).response for row in rows]
    assert [(row.status, row.reason) for row in rows] == [(499, "new"), (502, "new")]
    assert bodies[0] == b""
    assert b"refused" in (bodies[1] or b"")


async def test_a_failing_store_only_loses_the_record(
    server: TestServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets its answer although the request could not be recorded."""
    with (
        open_store(tmp_path) as store,
        serve_proxy(server.base_url, store=store, index=MemoryIndex()) as proxy,
    ):
        store.database.close()
        async with AsyncOpenAI(base_url=f"{proxy}/v1", api_key="k", max_retries=0) as client:
            response = await client.responses.create(model="practice", input="What is 2+3?")
        assert response.output_text == "2+3 = 5."
    assert "could not be recorded" in caplog.text
