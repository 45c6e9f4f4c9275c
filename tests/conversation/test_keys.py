"""The same request with the same idempotency key returns its answer, wherever the head is meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest

from conversation.conftest import BuildConversation, Connect
from kedge import Conversation, errors
from kedge.middleware import block, guard
from kedge.store import Store, open_store
from kedge.testing import TestServer
from kedge.web.app import create_page
from kedge.web.models import ModelSelector
from kedge.web.service import ConversationService


async def test_failed_question_is_sent_again_with_its_key(
    store: Store, kedge_server: TestServer, conversation_with: BuildConversation
) -> None:
    """A failed turn releases its key at once: another caller need not wait for the end of the lease."""
    conversation = await conversation_with(lease=1e6)
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await conversation.send("What is 2+4?", key="k")
    with anyio.fail_after(300):
        assert (await conversation.send("What is 2+4?", key="k")).text == "2+4 = 6."
    assert await conversation.pending() == []


async def test_key_runs_once(conversation: Conversation, kedge_server: TestServer) -> None:
    """A repeated key returns the stored answer without a request."""
    first = await conversation.send("What is 2+3?", key="k1")
    sent = len(kedge_server.requests)
    second = await conversation.send("What is 2+3?", key="k1")
    assert (second.text, second.node, second.stored) == (first.text, first.node, True)
    assert second.usage == first.usage
    assert (len(kedge_server.requests), len(conversation.turn)) == (sent, 2)


async def test_key_of_another_message_is_rejected(conversation: Conversation) -> None:
    """A key belongs to its message."""
    await conversation.send("What is 2+3?", key="k1")
    with pytest.raises(errors.KeyReused):
        await conversation.send("What is 2+4?", key="k1")


async def test_stored_answer_of_a_key_is_streamed(conversation: Conversation) -> None:
    """A stored answer is one delta of a stream, in async and in sync code."""
    first = await conversation.send("What is 2+3?", key="k1")
    async with conversation.stream("What is 2+3?", key="k1") as stream:
        assert [delta async for delta in stream.text_deltas()] == [first.text]
    assert stream.reply.stored

    def read_in_sync_code() -> list[str]:
        with conversation.sync.stream("What is 2+3?", key="k1") as stream:
            return list(stream.text_deltas())

    assert await asyncio.to_thread(read_in_sync_code) == [first.text]


async def test_concurrent_sends_with_one_key_run_once(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """Concurrent sends with the same key send one request and return the same answer."""
    replies: list[Any] = []
    others = [
        await Conversation.open(connected(), store=store, id=conversation.id) for _ in range(4)
    ]

    async def ask(each: Conversation) -> None:
        replies.append(await each.send("What is 2+3?", key="k1"))

    async with anyio.create_task_group() as group:
        for each in others:
            group.start_soon(ask, each)
    assert {(reply.text, reply.node) for reply in replies} == {(replies[0].text, replies[0].node)}
    assert sum(not reply.stored for reply in replies) == 1
    assert len(kedge_server.requests) == 1


async def test_key_after_a_head_conflict_runs_again_from_the_new_head(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """After a head conflict, the answer on the other branch is not returned for the key."""
    other = await Conversation.open(connected(), store=store, id=conversation.id)
    await other.send("My name is Ada.")
    with pytest.raises(errors.HeadConflict):
        await conversation.send("What is my name?", key="k")
    sent = len(kedge_server.requests)
    with pytest.raises(errors.HeadConflict):  # it would conflict again, so no request is sent
        await conversation.send("What is my name?", key="k")
    assert len(kedge_server.requests) == sent
    await conversation.refresh()
    reply = await conversation.send("What is my name?", key="k")
    assert (reply.text, reply.stored) == ("Your name is Ada.", False)
    assert reply.node == conversation.head == (await store.conversation(conversation.id)).head
    assert (await conversation.send("What is my name?", key="k")).stored


async def test_key_belongs_to_one_request(conversation: Conversation) -> None:
    """Another model, setting, schema or mode is a different request; streaming is not."""
    await conversation.send("What is 2+3?", key="k", temperature=0.1)
    assert (await conversation.send("What is 2+3?", key="k", temperature=0.1)).stored
    async with conversation.stream("What is 2+3?", key="k", temperature=0.1) as stream:
        assert (await stream.finish()).stored
    json_format = {"text": {"format": {"type": "json_object"}}}
    others = ({"temperature": 0.5}, {"model": "practice-2"}, json_format, {"mode": "stateless"})
    for changed in others:
        options: dict[str, Any] = {"temperature": 0.1, **changed}
        with pytest.raises(errors.KeyReused):
            await conversation.send("What is 2+3?", key="k", **options)


async def test_key_of_a_message_that_was_not_stored_is_free(
    store: Store, connected: Connect
) -> None:
    """A message that a guard rejects is not stored, so its key may be used for another message."""
    blocked = guard(block("Terror"))
    conversation = await Conversation.create(connected(), store=store, middleware=[blocked])
    with pytest.raises(errors.Blocked):
        await conversation.send("My ship is the Terror.", key="k")
    assert await conversation.pending() == []
    reply = await conversation.send("My ship is the Erebus.", key="k")
    assert (await conversation.send("My ship is the Erebus.", key="k")).node == reply.node


async def test_turn_that_is_cancelled_while_it_claims_its_key_releases_it(
    store: Store, connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that was stored just before the cancellation does not delay the next caller by its lease."""
    conversation = await Conversation.create(connected(), store=store, lease=1e6)
    claim = store.claim

    async def cancel_after_claim(*args: Any, **options: Any) -> Any:
        result = await claim(*args, **options)
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        return result

    monkeypatch.setattr(store, "claim", cancel_after_claim)
    with anyio.CancelScope() as scope:
        await conversation.send("What is 2+3?", key="k")
    assert scope.cancelled_caught
    monkeypatch.undo()
    with anyio.fail_after(300):
        assert (await conversation.send("What is 2+3?", key="k")).text == "2+3 = 5."


async def test_stored_reply_updates_the_head(
    store: Store, conversation: Conversation, connected: Connect
) -> None:
    """After a stored reply, the next message is sent with the context of the current head."""
    other = await Conversation.open(connected(), store=store, id=conversation.id)
    first = await other.send("My name is Ada.", key="k")
    await other.send("My ship is the Erebus.")
    reply = await conversation.send("My name is Ada.", key="k")
    assert (reply.stored, reply.node) == (True, first.node)
    assert (conversation.head, len(conversation.turn)) == (other.head, 4)
    assert (await conversation.send("What is my name?")).text == "Your name is Ada."


@pytest.fixture
async def stores(store_url: str) -> AsyncIterator[list[Store]]:
    """Yield two stores on one database, as two processes have them."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_store(store_url)) for _ in range(2)]


class Page:
    """The API of a page for one conversation."""

    def __init__(self, client: httpx2.AsyncClient, name: str) -> None:
        self.client = client
        self.path = f"/api/conversations/{name}"

    async def post(self, **body: Any) -> httpx2.Response:
        """Send a message."""
        return await self.client.post(f"{self.path}/runs", json={"model": "practice", **body})

    async def answer(self, **body: Any) -> Any:
        """Send a message, and return the answer."""
        response = await self.post(**body)
        assert response.is_success, response.text
        return response.json()

    async def error(self, **body: Any) -> tuple[int, str]:
        """Send a message that is rejected, and return the status and the code of the error."""
        response = await self.post(**body)
        return response.status_code, response.json()["error"]["code"]

    async def head(self) -> int:
        """Return the current head."""
        return (await self.client.get(self.path)).json()["head"]


@pytest.fixture
async def pages(stores: list[Store], connected: Connect) -> AsyncIterator[list[Page]]:
    """Yield the pages of two processes on one database, with a conversation of one message."""
    conversation = await Conversation.create(connected(), store=stores[0])
    await conversation.send("My name is Ada.")
    async with AsyncExitStack() as stack:
        found: list[Page] = []
        for store in stores:
            app = create_page(ConversationService(store, ModelSelector(connected(), ("practice",))))
            client = httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app), base_url="http://localhost"
            )
            found.append(Page(await stack.enter_async_context(client), conversation.id))
        yield found


async def test_key_with_head_is_idempotent(pages: list[Page], kedge_server: TestServer) -> None:
    """The same request again returns its answer after the head has moved to it, in every process."""
    one, two = pages
    head = await one.head()
    request: dict[str, Any] = {"message": "What is my name?", "head": head, "key": "k"}
    first = await one.answer(**request)
    sent = len(kedge_server.requests)
    for page in (one, two):
        again = await page.answer(**request)
        assert (again["text"], again["node"], again["stored"]) == (
            first["text"],
            first["node"],
            True,
        )
    later = await two.answer(message="And now?", head=first["node"], key="k2")
    for page in (one, two):
        assert (await page.answer(**request))["node"] == first["node"]
        assert await page.head() == later["node"]
    assert len(kedge_server.requests) == sent + 1


async def test_other_requests_with_an_old_head_are_rejected(pages: list[Page]) -> None:
    """A new key with an old head is a conflict, and so is a known key with another message."""
    one, two = pages
    head = await one.head()
    await one.answer(message="What is my name?", head=head, key="k")
    moved = await one.head()
    assert await two.error(message="What is my name?", head=head) == (409, "head_conflict")
    assert await two.error(message="What is my name?", head=head, key="new") == (
        409,
        "head_conflict",
    )
    assert (await two.error(message="Another?", head=head, key="k"))[0] == 409
    assert await one.head() == moved
    assert "another message" in (await two.post(message="Another?", head=head, key="k")).text


async def test_unanswered_key_with_an_old_head_is_rejected(
    pages: list[Page], kedge_server: TestServer
) -> None:
    """A message without an answer continues while the head is where it was, and is a conflict afterwards."""
    one, two = pages
    head = await one.head()
    request: dict[str, Any] = {"message": "What is my name?", "head": head, "key": "k"}
    kedge_server.faults.set("status=400")
    assert (await one.post(**request)).status_code >= 400
    kedge_server.faults.clear()
    assert (await two.answer(**request))["text"] == "Your name is Ada."
    kedge_server.faults.set("status=400")
    request = {**request, "head": await one.head(), "key": "k2"}
    assert (await one.post(**request)).status_code >= 400
    kedge_server.faults.clear()
    await two.answer(message="Something else")
    assert await one.error(**request) == (409, "head_conflict")


@pytest.mark.parametrize("has_head", [True, False])
async def test_edit_with_a_key_is_idempotent(
    pages: list[Page], kedge_server: TestServer, has_head: bool
) -> None:
    """An edited question that was answered is no longer on the path to the head, and is found for the same key."""
    one, two = pages
    question = (await one.client.get(f"{one.path}/turns")).json()["blocks"][0]["id"]
    request: dict[str, Any] = {"message": "My name is Bob.", "edit": question, "key": "k"}
    if has_head:
        request["head"] = await one.head()
    first = await one.answer(**request)
    sent = len(kedge_server.requests)
    for page in (one, two):
        again = await page.answer(**request)
        assert (again["node"], again["stored"]) == (first["node"], True)
    assert len(kedge_server.requests) == sent
    assert (await one.post(**{**request, "key": "k2"})).status_code in (404, 409)


async def test_key_continues_in_another_process_with_an_older_head(
    stores: list[Store], connected: Connect, kedge_server: TestServer
) -> None:
    """A question that failed in one process is continued by another one that has not seen the newest head."""
    one = await Conversation.create(connected(), store=stores[0], id="a")
    await one.send("Hello")
    two = await Conversation.open(connected(), store=stores[1], id="a")
    await one.send("My name is Ada.")
    kedge_server.faults.set("status=400")
    with pytest.raises(errors.RequestRefused):
        await one.send("What is my name?", key="k")
    kedge_server.faults.clear()
    reply = await two.send("What is my name?", key="k")
    assert reply.text == "Your name is Ada."
    assert (await one.send("What is my name?", key="k")).node == reply.node == one.head
    assert [node.kind for node in await one.path()].count("asked") == 3


async def test_key_continues_on_another_branch(
    stores: list[Store], connected: Connect, kedge_server: TestServer
) -> None:
    """A question that was sent at another node and failed is continued there, not stored twice."""
    one = await Conversation.create(connected(), store=stores[0], id="a")
    first = await one.send("My name is Ada.")
    await one.send("My name is Bob.")
    kedge_server.faults.set("status=400")
    with pytest.raises(errors.RequestRefused):
        await one.send("What is my name?", key="k", at=first.node)
    kedge_server.faults.clear()
    two = await Conversation.open(connected(), store=stores[1], id="a")
    reply = await two.send("What is my name?", key="k", at=first.node)
    assert reply.text == "Your name is Ada."
    assert (await one.send("What is my name?", key="k", at=first.node)).node == reply.node
    assert [node.kind for node in await one.tree()].count("asked") == 3
    assert await one.pending() == []
