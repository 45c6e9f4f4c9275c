"""Tests of deletions that can be undone: failures, several servers on one store, and shutdown."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kedge.errors import NotInStore, StoreError
from kedge.store import ConversationRow, Store, open_store
from kedge.web.deletions import DeletionQueue

LIMIT = 120.0
"""The maximum seconds of a wait, also on a busy machine."""


@pytest.fixture
async def stores(lasting_url: str) -> AsyncIterator[Sequence[Store]]:
    """Yield one store, opened by two servers."""
    async with open_store(lasting_url) as first, open_store(lasting_url) as second:
        yield first, second


def make_queue() -> DeletionQueue:
    """Return a queue that looks for deletions often."""
    return DeletionQueue(poll_seconds=0.01, retry_seconds=0.01)


async def wait_until_deleted(store: Store, row: ConversationRow) -> None:
    """Wait until a conversation is deleted."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                await store.conversation(row)
            except NotInStore:
                return


class WatchedStore(Store):
    """A store that records the results and errors of deletions."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.database, clock=store.clock)
        self.outcomes: asyncio.Queue[bool | StoreError] = asyncio.Queue()

    async def delete_scheduled(self, row: ConversationRow) -> bool:
        """Delete a conversation, and record the outcome."""
        try:
            result = await super().delete_scheduled(row)
        except StoreError as error:
            self.outcomes.put_nowait(error)
            raise
        self.outcomes.put_nowait(result)
        return result


async def test_busy_deletion_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A deletion that fails is logged, and tried again until the store is free."""
    path = tmp_path / "busy.db"
    async with open_store(f"sqlite:///{path}", wait_seconds=0.01) as opened:
        store = WatchedStore(opened)
        queue = make_queue()
        row = await store.create("Private")
        await store.schedule_delete(row, 1.0)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await queue.resume(store)
            async with asyncio.timeout(LIMIT):
                assert isinstance(await store.outcomes.get(), StoreError)
                assert isinstance(await store.outcomes.get(), StoreError)
        await wait_until_deleted(store, row)
        await queue.aclose()
    messages = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any("deletion failed and is tried again" in message for message in messages)


async def test_store_that_cannot_be_read_is_read_again(
    stores: Sequence[Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error or a bug while deletions are listed does not end the queue."""
    failures: list[Exception] = [StoreError("not now"), ValueError("a bug")]
    list_scheduled = stores[0].list_scheduled

    async def fail_twice() -> list[ConversationRow]:
        if failures:
            raise failures.pop(0)
        return await list_scheduled()

    monkeypatch.setattr(stores[0], "list_scheduled", fail_twice)
    row = await stores[0].create("Private")
    await stores[0].schedule_delete(row, 1.0)
    queue = make_queue()
    await queue.resume(stores[0])
    await wait_until_deleted(stores[1], row)
    await queue.aclose()
    assert "could not be read" in caplog.text
    assert "internal error of the scheduled deletions: ValueError" in caplog.text


async def test_other_servers_do_not_shorten_the_time_for_undo(stores: Sequence[Store]) -> None:
    """A server that starts, has a clock that is ahead, and shuts down leaves a deletion of another server."""
    first = make_queue()
    second = make_queue()
    row = await stores[0].create("Private")
    await first.schedule(stores[0], row, 3600)
    scheduled = await stores[0].conversation(row)
    await first.schedule(stores[0], scheduled, 7200)  # it is deleted at the earlier time
    assert (await stores[0].conversation(row)).delete_at == scheduled.delete_at
    ahead = Store(stores[1].database, clock=lambda: time.time() + 7200)
    due = await stores[0].create("Due")
    await stores[0].schedule_delete(due, 1.0)
    await second.resume(ahead)
    await wait_until_deleted(stores[0], due)
    await second.aclose()
    assert (await first.undo(stores[0], row.id)).delete_at is None
    await first.aclose()
    assert (await stores[1].conversation(row)).delete_at is None


async def test_shutdown_deletes_only_if_no_other_server_can(stores: Sequence[Store]) -> None:
    """At shutdown, a server on SQLite deletes what it has scheduled; on PostgreSQL, others do so in time."""
    queue = make_queue()
    row = await stores[0].create("Private")
    await queue.schedule(stores[0], row, 3600)
    await queue.aclose()
    is_shared = stores[0].database.dialect.name == "postgresql"
    assert bool(await stores[1].list_scheduled()) is is_shared


async def test_shutdown_with_a_busy_store_leaves_the_deletion(tmp_path: Path) -> None:
    """A shutdown does not wait for a busy store; the next server completes the deletion."""
    path = tmp_path / "busy.db"
    async with open_store(f"sqlite:///{path}", wait_seconds=0.01) as store:
        queue = make_queue()
        row = await store.create("Private")
        await queue.schedule(store, row, 3600)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await queue.aclose()
        assert [each.id for each in await store.list_scheduled()] == [row.id]
