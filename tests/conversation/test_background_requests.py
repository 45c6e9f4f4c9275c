"""A request in the background has one record: while it runs, and after it has ended."""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conversation.conftest import Connect
from engines.fake_server import serve_handler
from engines.test_background import FakeBackground
from kedge import Conversation, connect
from kedge.analytics import analyze
from kedge.engines import Reply
from kedge.errors import EngineError, HeadConflict, NotInStore, ServerFailed
from kedge.events import TextDelta
from kedge.middleware import trace
from kedge.observe import otel, reset, snapshot
from kedge.observe.logs import get_fields
from kedge.store import RequestRecord, Store, open_store
from kedge.store.summaries import load_exchanges
from kedge.store.tree import build_response_graph, read_tree
from kedge.testing import TestServer
from kedge.web.app import create_page
from kedge.web.models import ModelSelector
from kedge.web.service import ConversationService

SPAN_NAMES = ["chat practice", "fetch_response practice"]
QUESTION = "Say: Hello there."
Start = Callable[[Conversation], Awaitable[object]]


async def wait_later(conversation: Conversation) -> None:
    """Send a request, and wait for its answer in another call."""
    await conversation.send(QUESTION, background=True)


async def read_stream(conversation: Conversation) -> None:
    """Read the complete answer as a stream."""
    async with conversation.stream(QUESTION, background=True) as stream:
        await stream.finish()


async def leave_stream(conversation: Conversation) -> None:
    """Stop reading the answer at its first text."""
    async with conversation.stream(QUESTION, background=True) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                break


async def finish(conversation: Conversation, engine: Any) -> Reply | None:
    """Wait for the answer in another process, if it is pending."""
    opened = await Conversation.open(engine, store=conversation.store, id=conversation.id)
    return await opened.resume() if await opened.pending() else None


def list_posts(server: TestServer) -> list[Any]:
    """Return the requests for an answer that the server received."""
    return [each for each in server.requests if each.method == "POST"]


def describe_sent(row: RequestRecord) -> tuple[object, ...]:
    """Return what a record says about the request that was sent."""
    return row.mode, row.anchor, row.reason, row.sent_blocks, row.sent_bytes, row.saved_bytes


@pytest.mark.parametrize("start", [wait_later, read_stream, leave_stream])
async def test_a_request_in_the_background_has_one_row(
    start: Start, store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """The final row replaces that of the running response, with what was sent and what came back."""
    before = len(list_posts(kedge_server))
    conversation = await Conversation.create(connected(), store=store)
    await conversation.send("My name is Ada.")
    await start(conversation)
    running = (await store.responses())[-1]
    reply = await finish(conversation, connected())
    first, row = await store.responses()
    assert (row.status, row.anchor, row.reason) == ("completed", first.provider_response_id, "")
    assert row.sent_bytes == len(list_posts(kedge_server)[before + 1].raw)
    assert row.input_tokens is not None
    assert describe_sent(row) == describe_sent(running)
    if reply is not None:
        (record,) = reply.requests
        assert describe_sent(record) == describe_sent(row)
        assert record.usage == row.usage
    found = await analyze(store)
    assert (found.requests.total, found.requests.chained) == (2, 1)
    assert found.tokens.input == (first.input_tokens or 0) + row.input_tokens
    assert await store.verify() == []


async def test_a_stop_while_the_response_runs_adds_no_row(store: Store, connected: Connect) -> None:
    """The response is not stopped at the server, so its row says that it is running."""
    conversation = await Conversation.create(connected(), store=store)
    await leave_stream(conversation)
    assert [row.status for row in await store.responses()] == ["running"]
    assert len(await conversation.pending()) == 1


async def test_sums_follow_the_final_row(store: Store, connected: Connect) -> None:
    """Statistics that were computed while the response was running are corrected."""
    conversation = await Conversation.create(connected(), store=store)
    await wait_later(conversation)
    statuses = (await analyze(store)).requests.statuses
    assert [(each.name, each.count) for each in statuses] == [("running", 1)]
    await finish(conversation, connected())
    statuses = (await analyze(store)).requests.statuses
    assert [(each.name, each.count) for each in statuses] == [("completed", 1)]
    assert await store.verify() == []


async def test_bodies_are_found_at_the_final_row(
    store_url: str, connected: Connect, kedge_server: TestServer
) -> None:
    """The stored bodies move with the row."""
    before = len(list_posts(kedge_server))
    async with open_store(store_url, keep_bodies=True) as store:
        conversation = await Conversation.create(connected(), store=store)
        await wait_later(conversation)
        await finish(conversation, connected())
        (row,) = await store.responses()
        bodies = [each.request for each in await load_exchanges(store, row.node)]
    assert bodies == [list_posts(kedge_server)[before].raw]


async def test_two_processes_that_wait_store_one_row(store: Store, connected: Connect) -> None:
    """The second one finds the response answered."""
    conversation = await Conversation.create(connected(), store=store)
    await wait_later(conversation)
    opened = [
        await Conversation.open(connected(), store=store, id=conversation.id) for _ in range(2)
    ]

    async def resume(each: Conversation) -> None:
        with contextlib.suppress(HeadConflict, NotInStore):
            await each.resume()

    await opened[0].resume()
    await resume(opened[1])
    assert [row.status for row in await store.responses()] == ["completed"]
    await wait_later(await Conversation.open(connected(), store=store, id=conversation.id))
    async with anyio.create_task_group() as group:
        for _ in range(2):
            each = await Conversation.open(connected(), store=store, id=conversation.id)
            group.start_soon(resume, each)
    assert [row.status for row in await store.responses()] == ["completed", "completed"]


async def test_a_response_that_failed_replaces_the_running_row(store: Store) -> None:
    """A resumed question is then sent again, because nothing runs any more."""
    server = FakeBackground("failed")
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            conversation = await Conversation.create(engine, store=store)
            await wait_later(conversation)
            with pytest.raises(ServerFailed):
                await finish(conversation, engine)
            assert [row.status for row in await store.responses()] == ["failed"]
            assert len(await conversation.pending()) == 1
            server.status = "completed"
            await conversation.resume(background=True)
            await finish(conversation, engine)
    assert [row.status for row in await store.responses()] == ["failed", "completed"]
    assert server.posts == 2


async def test_a_failed_poll_changes_no_row(store: Store) -> None:
    """The response is still generated if the server cannot be reached."""
    server = FakeBackground("completed", 503)
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            conversation = await Conversation.create(engine, store=store)
            await wait_later(conversation)
            with pytest.raises(EngineError):
                await finish(conversation, engine)
            assert [row.status for row in await store.responses()] == ["running"]
            server.code = 200
            await finish(conversation, engine)
    assert [row.status for row in await store.responses()] == ["completed"]
    assert server.posts == 1


@pytest.mark.parametrize("start", [wait_later, read_stream, leave_stream])
async def test_metrics_and_the_log_count_the_request_once(
    start: Start, store: Store, connected: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """What was sent is counted when it was sent, tokens when they are known, and one log record has both."""
    caplog.set_level(logging.INFO, "kedge")
    conversation = await Conversation.create(connected(), store=store)
    reset()
    await start(conversation)
    await finish(conversation, connected())
    (row,) = await store.responses()
    counters = {
        (name, *(value for _, value in labels)): value[1]
        for name, series in snapshot().items()
        for labels, value in series.items()
    }
    assert counters["responses_stateless_requests_total",] == 1
    assert counters["responses_bytes_sent_total",] == row.sent_bytes
    assert counters["tokens_total", "input"] == row.input_tokens
    fields = [dict(get_fields(each)) for each in caplog.records]
    (logged,) = [each for each in fields if "sent_bytes" in each]
    assert (logged["status"], logged["sent_bytes"]) == ("completed", row.sent_bytes)
    assert logged["input_tokens"] == row.input_tokens


@pytest.mark.parametrize("start", [wait_later, leave_stream])
async def test_the_span_of_the_request_is_no_failure(
    start: Start, store: Store, connected: Connect
) -> None:
    """One span says what was sent, without a reason for the end of the answer; a second one has the tokens."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    traced = trace(provider.get_tracer("test"))
    conversation = await Conversation.create(connected(), store=store, middleware=[traced])
    await start(conversation)
    opened = await Conversation.open(
        connected(), store=store, id=conversation.id, middleware=[traced]
    )
    await opened.resume()
    finished = {each.name: each for each in spans.get_finished_spans()}
    sent, fetched = (finished[name] for name in SPAN_NAMES)
    assert sent.status.is_ok
    assert sent.attributes is not None
    assert otel.FINISH_REASONS not in sent.attributes
    (row,) = await store.responses()
    assert sent.attributes[otel.SENT_BYTES] == row.sent_bytes
    assert fetched.attributes is not None
    assert fetched.attributes[otel.INPUT_TOKENS] == row.input_tokens
    assert fetched.attributes[otel.RESPONSE_ID] == row.provider_response_id
    provider.shutdown()


async def test_views_show_the_request_while_it_runs(store: Store, connected: Connect) -> None:
    """The chain has the request, which is pending, and the page does not say that it failed."""
    engine = connected()
    conversation = await Conversation.create(engine, store=store)
    await wait_later(conversation)
    (row,) = await store.responses()
    graph = build_response_graph(await read_tree(store, conversation.row), store.clock())
    assert [(each.id, each.label, each.marks) for each in graph.nodes] == [
        (row.node, QUESTION, {"pending"})
    ]
    page = create_page(ConversationService(store, ModelSelector(engine, ("practice",))))
    transport = httpx2.ASGITransport(page)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        path = f"/conversations/{conversation.id}"
        html = (await client.get(path, params={"at": str(row.node)})).text
    assert "still generated in the background" in html
    assert "The request failed" not in html
    await conversation.resume()
    (row,) = await store.responses()
    graph = build_response_graph(await read_tree(store, conversation.row), store.clock())
    assert [(each.id, each.label, each.marks) for each in graph.nodes] == [
        (row.node, QUESTION, {"head"})
    ]
