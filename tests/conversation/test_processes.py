"""Conversations used by several processes, and response ids from the stream to the store."""

from pathlib import Path

from conversation.conftest import Connect
from forked import run_forked_async
from kedge import Conversation
from kedge.store import Store, open_store
from kedge.testing import TestServer
from postgresql import create_schema

HERE = Path(__file__).parent
WORKERS, ITEMS = 4, 2


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


async def test_four_processes_lose_nothing(postgres_url: str, kedge_server: TestServer) -> None:
    """Concurrent processes lose and duplicate no message; each conversation has one head."""
    with create_schema(postgres_url) as url:
        async with open_store(url) as store:
            conversations = [(await store.create(f"Talk {number}")).id for number in range(2)]
            shared = (await store.create("Shared")).id
            arguments = (url, kedge_server.base_url, str(WORKERS), str(ITEMS), shared)
            script = str(HERE / "worker.py")
            done = await run_forked_async(script, *arguments, *conversations, check=True)
            lost = [int(line) for line in done.stdout.split()]
            assert len(lost) == WORKERS
            expected = sorted(f"worker w{w} item {i}" for w in range(WORKERS) for i in range(ITEMS))
            for name in conversations:
                row = await store.conversation(name)
                turn = (await store.load(row)).turn()
                texts = [block.text for block in turn if block.kind == "user"]  # type: ignore[attr-defined]
                assert sorted(texts) == expected
                assert [block.kind for block in turn] == ["user", "assistant"] * len(expected)
            row = await store.conversation(shared)
            assert len((await store.load(row)).blocks) == 2
            responses = await store.responses()
            assert len(responses) == 1 + len(conversations) * len(expected) + sum(lost)
            assert len({row.provider_response_id for row in responses}) == len(responses)
            posted = [each for each in kedge_server.requests if each.method == "POST"]
            assert len(posted) == len(responses)
            assert await store.verify() == []
            for row in await store.conversations():
                assert await store.pending(row) == []
