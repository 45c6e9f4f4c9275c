"""The same request with the same idempotency key returns its answer, wherever the head is meanwhile."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from conversation.conftest import Connect
from kedge import Conversation, errors
from kedge.store import Store, open_store
from kedge.testing import TestServer
from kedge.web.app import create_page
from kedge.web.models import ModelSelector
from kedge.web.service import ConversationService


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
