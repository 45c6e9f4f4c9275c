"""A request in the background has one record: while it runs, and after it has ended."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import httpx2
import pytest
from msgspec.structs import replace

from conversation.conftest import BuildConversation, Connect
from engines.fake_server import serve_handler
from engines.runs import read_until
from engines.test_background import FakeBackground
from engines.test_sent_request import BackgroundServer
from fake_time import FakeTime
from kedge import Conversation, connect
from kedge.analytics import analyze
from kedge.compaction import MessageLimitCompactor
from kedge.engines import Reply
from kedge.errors import EngineError, RequestRefused, ServerFailed
from kedge.events import ResponseStarted
from kedge.events.run import RequestPlanned
from kedge.observe import reset, snapshot
from kedge.observe.logs import get_fields
from kedge.planning import Mode
from kedge.presentation.response_tree import build_response_tree
from kedge.store import RequestRecord, Store
from kedge.store.tree import read_tree
from kedge.testing import TestServer
from kedge.web.app import create_page
from kedge.web.models import ModelSelector
from kedge.web.service import ConversationService
from normalization import expected_context, normalize_items

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
        await read_until(stream)


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


async def test_a_key_is_free_while_its_response_runs_in_the_background(
    store: Store, connected: Connect
) -> None:
    """The same key continues with the response at once, instead of after the lease of the first call."""
    conversation = Conversation(connected(), store=store)
    running = await conversation.send(QUESTION, background=True, key="k")
    with anyio.fail_after(10):  # the lease has 30 seconds
        later = running
        while later.status == "running":
            later = await conversation.send(QUESTION, background=True, key="k")
    assert later.text == "Hello there."
    assert later.response_id == running.response_id
    assert (await conversation.send(QUESTION, background=True, key="k")).stored


class Answered(NamedTuple):
    """A conversation whose last answer was generated in the background, and its records."""

    first: RequestRecord
    running: RequestRecord
    """The record of the request while the answer was generated."""
    final: RequestRecord
    reply: Reply | None
    body: bytes
    """The request as the server received it."""


@pytest.fixture(params=[wait_later, read_stream, leave_stream])
async def answered(
    request: pytest.FixtureRequest,
    store: Store,
    kedge_server: TestServer,
    connected: Connect,
    conversation_with: BuildConversation,
) -> Answered:
    """Return the records of an answer for which a call waited, later or at once, or whose stream was left."""
    before = len(list_posts(kedge_server))
    conversation = await conversation_with("My name is Ada.")
    await request.param(conversation)
    running = (await store.responses())[-1]
    reply = await finish(conversation, connected())
    first, final = await store.responses()
    return Answered(first, running, final, reply, list_posts(kedge_server)[before + 1].raw)


async def test_a_request_in_the_background_has_one_row(answered: Answered) -> None:
    """The final row replaces that of the running response, with what was sent and what came back."""
    row = answered.final
    anchor = answered.first.provider_response_id
    assert (row.status, row.anchor, row.reason) == ("completed", anchor, "")
    assert row.sent_bytes == len(answered.body)
    assert row.input_tokens is not None
    assert describe_sent(row) == describe_sent(answered.running)


async def test_reply_of_a_request_in_the_background_has_its_record(answered: Answered) -> None:
    """A call that waits for the answer returns the record that is stored."""
    if answered.reply is None:  # the answer was there before
        assert answered.running.status == "completed"
        return
    (record,) = answered.reply.requests
    assert describe_sent(record) == describe_sent(answered.final)
    assert record.usage == answered.final.usage


async def test_a_request_in_the_background_is_counted_once(
    store: Store, answered: Answered
) -> None:
    """Statistics have one request and its tokens."""
    analytics = await analyze(store)
    assert (analytics.requests.total, analytics.requests.chained) == (2, 1)
    tokens = [record.input_tokens or 0 for record in (answered.first, answered.final)]
    assert analytics.tokens.input == sum(tokens)
    assert await store.verify() == []


@pytest.mark.parametrize("streaming", [False, True])
async def test_two_processes_at_once_return_the_stored_record(
    streaming: bool, store: Store, connected: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Both wait for one response: one stores its answer, both return it, and it is counted once."""
    caplog.set_level(logging.INFO, "kedge")
    conversation = await Conversation.create(connected(), store=store)
    await conversation.send("My name is Ada.")
    reset()
    caplog.clear()
    await wait_later(conversation)
    barrier = asyncio.Barrier(2)
    replies: list[Reply] = []

    async def resume(each: Conversation) -> None:
        async with each.stream_resume(streaming=streaming) as stream:
            async for event in stream:
                if isinstance(event, RequestPlanned):
                    await barrier.wait()
        replies.append(stream.reply)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            each = await Conversation.open(connected(), store=store, id=conversation.id)
            group.start_soon(resume, each)
    _, row = await store.responses()
    one, other = replies
    records = [
        replace(each, node=0, parent=0, conversation="")
        for each in (row, *one.requests, *other.requests)
    ]
    assert records == records[:1] * 3
    assert one.node == other.node == row.node
    assert one.turn.blocks == other.turn.blocks
    assert (row.status, row.sent_blocks) == ("completed", 1)
    assert len(await store.tree(conversation.row)) == 6
    fields = [dict(get_fields(each)) for each in caplog.records]
    assert len([each for each in fields if "sent_bytes" in each]) == 1
    assert snapshot()["tokens_total"][("kind", "input"),][1] == row.input_tokens
    assert await store.verify() == []


@pytest.mark.parametrize("failed", [True, False])
async def test_a_failed_response_is_told_from_a_failed_poll(store: Store, failed: bool) -> None:
    """A response that failed replaces the running row, and its question is sent again; after a failed poll it runs."""
    server = FakeBackground("failed") if failed else FakeBackground("completed", 503)
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            conversation = await Conversation.create(engine, store=store)
            await wait_later(conversation)
            with pytest.raises(ServerFailed if failed else EngineError):
                await finish(conversation, engine)
            (row,) = await store.responses()
            assert row.status == ("failed" if failed else "running")
            assert len(await conversation.pending()) == 1
            server.status, server.code = "completed", 200
            if failed:
                await conversation.resume(background=True)
            await finish(conversation, engine)
    statuses = ["failed", "completed"] if failed else ["completed"]
    assert [row.status for row in await store.responses()] == statuses
    assert server.posts == len(statuses)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_response_that_is_not_found_stays_unknown(store: Store, streaming: bool) -> None:
    """Its row says so and why, its question is pending, and a later call gets its answer without another request."""
    server = FakeBackground("completed", 404)
    time = FakeTime()
    with serve_handler(server.handle) as url:
        async with connect(
            f"responses:{url}#m", max_retries=0, clock=time.clock, sleep=time.sleep
        ) as engine:
            conversation = await Conversation.create(engine, store=store)
            await wait_later(conversation)
            for _ in range(2):
                again = await Conversation.open(engine, store=store, id=conversation.id)
                with pytest.raises(RequestRefused, match="not known"):
                    await again.resume(streaming=streaming)
            (row,) = await store.responses()
            assert (row.status, row.error_code) == ("unknown", "404")
            assert row.sent_request is not None
            assert "not known whether" in row.error
            assert await store.verify() == []
            opened = await Conversation.open(engine, store=store, id=conversation.id)
            assert (await analyze(store)).requests.failed == 0
            assert await read_graph(conversation) == [(row.node, QUESTION, {"pending"})]
            assert len(await opened.pending()) == 1
            server.code = 200
            reply = await opened.resume(streaming=streaming)
    (row,) = await store.responses()
    assert (row.status, row.error, row.error_code) == ("completed", "", "")
    assert reply.text == "Done."
    assert server.posts == 1
    assert await store.verify() == []


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cause", ["untrusted", "expired"])
@pytest.mark.parametrize("mode", [None, "stateless", "conversation"])
async def test_nothing_is_compacted_while_the_answer_is_generated(
    store: Store,
    connected: Connect,
    kedge_server: TestServer,
    conversation_with: BuildConversation,
    cause: str,
    mode: Mode | None,
    streaming: bool,
) -> None:
    """Another process that would send everything waits for the answer, which replaces the running row."""
    conversation = await conversation_with("One.", "Two.", "Three.")
    await wait_later(conversation)
    before = list_posts(kedge_server)
    if cause == "expired":
        await conversation.set_retention(0.001)
    other = await Conversation.open(
        connected(trust="never" if cause == "untrusted" else "earned"),
        store=store,
        id=conversation.id,
        compactor=MessageLimitCompactor(1_000, 2),
        resend_limit=1,
    )
    reply = await other.resume(streaming=streaming, mode=mode)
    assert reply.text == "Hello there."
    assert list_posts(kedge_server) == before
    assert [row.status for row in await store.responses()] == ["completed"] * 4
    assert not [node for node in await other.tree() if node.kind == "compacted"]


async def test_a_response_that_no_run_waits_for_is_unknown(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """Another account sends another request; the row of the first one does not stay ``running`` for ever."""
    conversation = await Conversation.create(connected(), store=store)
    await wait_later(conversation)
    other = await Conversation.open(connected(api_key="another"), store=store, id=conversation.id)
    assert (await other.resume()).text == "Hello there."
    assert len(list_posts(kedge_server)) == 2
    replaced, answered = await store.responses()
    assert (replaced.status, answered.status) == ("unknown", "completed")
    assert "another request was sent instead" in replaced.error
    assert await store.verify() == []


async def test_a_stored_request_is_kept_until_its_answer(store: Store, connected: Connect) -> None:
    """The row of a running response has what was sent, by which another process judges the answer."""
    conversation = await Conversation.create(connected(), store=store)
    await wait_later(conversation)
    (running,) = await store.responses()
    assert running.sent_request is not None
    assert running.sent_request.digest == running.digest
    assert await store.verify() == []
    opened = await Conversation.open(connected(), store=store, id=conversation.id)
    await opened.resume(mode="stateless", store=False)
    (row,) = await store.responses()
    assert (row.status, row.stored, row.sent_request) == ("completed", True, None)
    assert opened.plan("And now?").anchor_id == row.provider_response_id


async def test_a_left_answer_to_a_stored_prompt_is_not_continued(store: Store) -> None:
    """A stream that is left is stored with what was sent, so that the next message is sent in full."""
    server = BackgroundServer()
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", trust="always") as engine:
            conversation = await Conversation.create(engine, store=store)
            await conversation.send("My name is Ada.")
            async with conversation.stream(
                QUESTION, background=True, prompt={"id": "pmpt_1"}
            ) as stream:
                await read_until(stream, ResponseStarted)
            running = (await store.responses())[-1]
            assert (running.status, running.stored) == ("running", False)
            await finish(conversation, engine)
            opened = await Conversation.open(engine, store=store, id=conversation.id)
            reply = await opened.send("And now?")
    # The newest response whose context is known is the first one.
    first = (await store.responses())[0]
    assert server.bodies[-1]["previous_response_id"] == first.provider_response_id
    assert normalize_items(server.contexts[-1]) == expected_context(reply.turn)
    assert await store.verify() == []


async def read_graph(conversation: Conversation) -> list[tuple[int, str, object]]:
    """Return what the graph of a conversation shows."""
    store = conversation.store
    graph = build_response_tree(await read_tree(store, conversation.row), store.clock())
    return [(each.id, each.label, each.marks) for each in graph.nodes]


async def test_views_show_the_request_while_it_runs(store: Store, connected: Connect) -> None:
    """The chain has the request, which is pending, and the page does not say that it failed."""
    engine = connected()
    conversation = await Conversation.create(engine, store=store)
    await wait_later(conversation)
    (row,) = await store.responses()
    assert await read_graph(conversation) == [(row.node, QUESTION, {"pending"})]
    page = create_page(ConversationService(store, ModelSelector(engine, ("practice",))))
    transport = httpx2.ASGITransport(page)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        path = f"/conversations/{conversation.id}"
        html = (await client.get(path, params={"at": str(row.node)})).text
    assert "still generated in the background" in html
    assert "The request failed" not in html
    await conversation.resume()
    (row,) = await store.responses()
    assert await read_graph(conversation) == [(row.node, QUESTION, {"head"})]
