"""Twenty conversations send while PostgreSQL terminates, freezes or locks: nothing that was confirmed is lost.

A fault lasts until every conversation has an answer or an error, so an unlimited wait fails the test. The time of each
operation of the store is compared with the documented limit. ``KEDGE_OUTAGES`` sets the number of rounds.
"""

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import anyio
import psycopg
import pytest

from kedge import Conversation
from kedge.errors import HeadConflict, StoreBusy, StoreUnreachable
from kedge.store import Store, open_store
from kedge.store.database.postgres import MARGIN_SECONDS, PostgresDatabase
from kedge.turns import UserBlock
from postgresql import PostgresServer, create_schema, freeze_server, terminate_clients
from server.waiting import TIMEOUT, wait_until_async

ROUNDS = int(os.environ.get("KEDGE_OUTAGES", "1"))
CONVERSATIONS = 20
WAIT_SECONDS, STATEMENT_SECONDS = 2.0, 2.0
LIMIT = WAIT_SECONDS + STATEMENT_SECONDS + MARGIN_SECONDS
SCHEDULING_SECONDS = 60.0
"""How much later than at the limit a busy machine may run a thread."""


class Senders:
    """Conversations that send, the messages whose send returned, and the longest operation of their store."""

    def __init__(self, store: Store, conversations: list[Conversation]) -> None:
        self.store = store
        self.conversations = conversations
        self.confirmed: list[list[str]] = [[] for _ in conversations]
        self.failures = 0
        self._sent = 0

    async def send(self, index: int) -> bool:
        """Send the next message of a conversation; return whether it was confirmed."""
        conversation = self.conversations[index]
        self._sent += 1
        text = f"message {self._sent}"
        try:
            await conversation.send(text)
        except (StoreBusy, StoreUnreachable):
            self.failures += 1
            return False
        except HeadConflict:  # an earlier send failed after its commit
            return False
        self.confirmed[index].append(text)
        return True

    async def send_all(self, indexes: range) -> None:
        """Send one message in each of some conversations at the same time."""
        async with anyio.create_task_group() as group:
            for index in indexes:
                group.start_soon(self.send, index)

    async def send_until(self, index: int, stop: anyio.Event) -> None:
        """Send messages one after the other."""
        while not stop.is_set():
            if not await self.send(index):
                with suppress(StoreBusy, StoreUnreachable):
                    await self.conversations[index].refresh()

    async def wait_for_confirmations(self) -> None:
        """Wait until two more messages of the first conversation are confirmed."""
        before = len(self.confirmed[0])
        await wait_until_async(lambda: len(self.confirmed[0]) > before + 1)

    async def recover(self, index: int) -> None:
        """Load a conversation as it is stored, and send until a message is confirmed."""
        while True:
            try:
                await self.conversations[index].refresh()
            except (StoreBusy, StoreUnreachable):
                continue
            if await self.send(index):
                return

    async def check(self) -> None:
        """Every confirmed message is in its conversation, and the store is valid."""
        for conversation, texts in zip(self.conversations, self.confirmed, strict=True):
            await conversation.refresh()
            stored = [
                block.text for block in conversation.turn.blocks if isinstance(block, UserBlock)
            ]
            assert [text for text in texts if text not in stored] == []
        assert await self.store.verify() == []


@pytest.fixture
async def senders(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Senders]:
    """Yield conversations in a store with short limits; at the end no operation was longer than they allow."""
    durations: list[float] = []
    run = PostgresDatabase._retry

    def measure(pool: PostgresDatabase, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        try:
            return run(pool, *args, **options)
        finally:
            durations.append(time.monotonic() - started)

    monkeypatch.setattr(PostgresDatabase, "_retry", measure)
    with create_schema(own_server.url) as url:
        async with open_store(
            url, wait_seconds=WAIT_SECONDS, statement_seconds=STATEMENT_SECONDS
        ) as store:
            conversations = [
                await Conversation.create("practice", store=store) for _ in range(CONVERSATIONS)
            ]
            yield Senders(store, conversations)
    assert max(durations) < LIMIT + SCHEDULING_SECONDS


@contextmanager
def terminate(server: PostgresServer, _: str) -> Iterator[None]:
    """Terminate all connections once."""
    terminate_clients(server.url)
    yield


def stop_answering(server: PostgresServer, _: str) -> AbstractContextManager[None]:
    """Stop all processes of the server."""
    return freeze_server(server)


@contextmanager
def lock_tables(_: PostgresServer, url: str) -> Iterator[None]:
    """Lock the tables of every send in another session."""
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE nodes, links")
        yield


FAULTS = [terminate, stop_answering, lock_tables]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
async def test_confirmed_messages_survive(
    senders: Senders, own_server: PostgresServer, fault: Any, is_busy: bool
) -> None:
    """Sends before, during and after a fault end, and every confirmed message is stored."""
    url = senders.store.database._url  # pyright: ignore[reportAttributeAccessIssue] - of the pool
    busy = range(CONVERSATIONS // 2 if is_busy else 0)
    for _ in range(ROUNDS):
        with anyio.fail_after(TIMEOUT):
            await senders.send_all(range(CONVERSATIONS))
            stop = anyio.Event()
            async with anyio.create_task_group() as group:
                for index in busy:
                    group.start_soon(senders.send_until, index, stop)
                if busy:
                    await senders.wait_for_confirmations()
                with fault(own_server, url):
                    await senders.send_all(range(len(busy), CONVERSATIONS))
                stop.set()
            async with anyio.create_task_group() as group:
                for index in range(CONVERSATIONS):
                    group.start_soon(senders.recover, index)
    await senders.check()
    if fault is not terminate:
        assert senders.failures
