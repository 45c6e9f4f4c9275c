"""Conversations used by several writers, and stored requests and replies."""

from contextlib import AsyncExitStack

import anyio

from conversation.conftest import Connect
from kedge import Conversation, HeadConflict
from kedge.store import Store, open_store
from kedge.testing import TestServer
from kedge.turns import UserBlock

WRITERS, ITEMS = 4, 2


async def test_bodies_are_stored_on_request(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """With `keep_bodies`, requests and replies are stored up to a limit, including rejected requests."""
    conversation = await Conversation.create(connected(), store=store)
    await conversation.send("What is 2+3?")
    assert await store.exchanges(conversation.row) == []
    store.keep_bodies, store.body_bytes = True, 300
    await conversation.send("What is 1+1?")
    kedge_server.forget()
    await conversation.send("And 2+2?")
    plain, rejected, healed = await store.exchanges(conversation.row)
    assert b"What is 1+1?" in plain.request
    assert (plain.status, len(plain.reply)) == (200, 300)
    assert (rejected.status, healed.status) == (400, 200)
    assert rejected.request != healed.request
    assert b"not found" in rejected.reply


async def test_concurrent_writers_lose_nothing(
    store_url: str, kedge_server: TestServer, connected: Connect
) -> None:
    """Writers with stores of their own lose and duplicate no message, and send that of a key once."""
    conflicts: list[HeadConflict] = []

    async def send(store: Store, text: str) -> None:
        while True:
            conversation = await Conversation.open(connected(), store=store, id="talk")
            try:
                await conversation.send(text)
            except HeadConflict as conflict:
                conflicts.append(conflict)
            else:
                return

    async def write(store: Store, number: int) -> None:
        shared = await Conversation.open(connected(), store=store, id="shared", lease=300)
        assert (await shared.send("What is 2+3?", key="once")).text == "2+3 = 5."
        for item in range(ITEMS):
            await send(store, f"writer {number} item {item}")

    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(open_store(store_url)) for _ in range(WRITERS)]
        store = stores[0]
        for name in ("talk", "shared"):
            await store.create(id=name)
        async with anyio.create_task_group() as group:
            for number, each in enumerate(stores):
                group.start_soon(write, each, number)
        talk, shared = [await store.conversation(name) for name in ("talk", "shared")]
        turn = (await store.load(talk)).turn()
        expected = [f"writer {number} item {i}" for number in range(WRITERS) for i in range(ITEMS)]
        texts = [block.text for block in turn if isinstance(block, UserBlock)]
        assert sorted(texts) == expected
        assert [block.kind for block in turn] == ["user", "assistant"] * len(expected)
        assert len((await store.load(shared)).blocks) == 2
        responses = {row.provider_response_id for row in await store.responses()}
        assert len(responses) == 1 + len(expected) + len(conflicts)
        posted = [each for each in kedge_server.requests if each.method == "POST"]
        assert len(posted) == len(responses)
        assert await store.verify() == []
        assert [await store.pending(row) for row in (talk, shared)] == [[], []]
