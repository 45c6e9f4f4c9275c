"""Faults of a SQLite store: killed processes, a full disk, missing permissions and concurrent access."""

import asyncio
import gc
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from forked import run_forked_async
from kedge import Conversation, user
from kedge.analytics import analyze
from kedge.errors import (
    CannotOpenStore,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreReplaced,
)
from kedge.events import TextDelta
from kedge.store import TokenRegistry, open_store
from kedge.store.database.sqlite import SQLiteDatabase
from kedge.store.database.transactions import Tx
from kedge.store.open import open_current_database
from kedge.testing import TestServer
from store.crash_writer import check_store
from store.sample_conversations import count_rows, create_conversation

WRITER = Path(__file__).parent / "crash_writer.py"
KILLS = int(os.environ.get("KEDGE_KILLS", "5"))


async def kill_writers(url: str, kills: int, seed: int) -> int:
    """Kill this many writers, and return the number of acknowledged writes, all of which were found."""
    done = await run_forked_async(str(WRITER), url, str(kills), str(seed), check=True, timeout=None)
    killed, acknowledged = map(int, done.stdout.split())
    assert killed == kills
    return acknowledged


async def test_killed_writers_lose_nothing_acknowledged(lasting_url: str) -> None:
    """After writers were killed at random moments, the store opens with all acknowledged writes."""
    assert await kill_writers(lasting_url, KILLS, 7) > KILLS


async def test_full_disk_writes_nothing(tmp_path: Path) -> None:
    """A transaction that does not fit is rolled back, and the store works again when there is space."""
    async with open_store(f"sqlite:///{tmp_path}/full.db") as store:
        row, nodes = await create_conversation(store, 3)
        before = await count_rows(store, "nodes", "links", "blocks", "responses")
        limit = "PRAGMA max_page_count = 1"  # no pages beyond the existing ones
        await store.database.write(lambda tx: tx.rows(limit))
        with pytest.raises(StoreFull, match="full; nothing was written"):
            await store.append(row, nodes[-1], [user("x" * 100_000)], head=nodes[-1].id)
        assert await count_rows(store, "nodes", "links", "blocks", "responses") == before
        assert await store.verify() == []
        await store.database.write(lambda tx: tx.rows("PRAGMA max_page_count = 100000"))
        await store.append(row, nodes[-1], [user("x" * 100_000)], head=nodes[-1].id)


FILL_SCRIPT = """
import asyncio, resource, signal, sys
from kedge import user
from kedge.analytics import analyze
from kedge.errors import StoreFull
from kedge.store import open_store

async def main():
    async with await open_store(sys.argv[1]) as store:
        row = await store.create()
        node = (await store.load(row)).node
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        try:
            while True:
                node = await store.append(row, node, [user("x" * 5_000)], head=node.id)
                print(row.id, node.id, node.length, flush=True)
        except StoreFull as error:
            print(error, file=sys.stderr)

asyncio.run(main())
"""


async def test_disk_that_fills_while_writing(tmp_path: Path) -> None:
    """A file system that rejects growth during a transaction loses no acknowledged write."""
    url = f"sqlite:///{tmp_path}/filled.db"
    done = await run_forked_async("-c", FILL_SCRIPT, url, check=True)
    assert "nothing was written" in done.stderr
    acknowledged = done.stdout.splitlines()
    assert acknowledged
    await check_store(url, acknowledged)


async def test_read_only_store(tmp_path: Path) -> None:
    """Reading a store opened with `mode=ro` works; writing raises `StoreReadOnly`."""
    path = tmp_path / "read.db"
    async with open_store(f"sqlite:///{path}") as store:
        row, nodes = await create_conversation(store, 2)
    async with open_store(f"sqlite:///{path}?mode=ro") as store:
        assert len((await store.load(await store.conversation(row.id))).blocks) == 4
        for write in (
            store.append(row, nodes[-1], [user("no")], head=nodes[-1].id),
            store.create(),
            store.delete(row.id),
        ):
            with pytest.raises(StoreReadOnly, match="nothing was written"):
                await write
        assert await store.verify() == []
        assert len(await store.search("question")) == 2  # also without an index
        assert await store.search("missing") == []


UNPRIVILEGED_SCRIPT = """
import asyncio, os, sys
from kedge.errors import StoreError
from kedge.store import open_store

async def main():
    async with await open_store("sqlite://:memory:") as store:  # imports everything as the current user
        await store.create()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        async with await open_store(sys.argv[1]) as store:
            await store.create()
    except StoreError as error:
        print(type(error).__name__, error)

asyncio.run(main())
"""


async def test_file_of_another_user(tmp_path: Path) -> None:
    """Missing permissions raise `StoreReadOnly` or `CannotOpenStore`, not an error about damage."""
    path = tmp_path / "theirs.db"
    async with open_store(f"sqlite:///{path}") as store:
        await create_conversation(store, 1)
    await anyio.Path(path).chmod(0o444)
    await anyio.Path(tmp_path).chmod(0o755)
    done = await run_forked_async("-c", UNPRIVILEGED_SCRIPT, f"sqlite:///{path}")
    assert done.stdout.startswith(("StoreReadOnly", "CannotOpenStore")), done


async def test_address_that_cannot_be_opened(tmp_path: Path) -> None:
    """A file that is no database, a folder, a missing folder and an unknown option are rejected and unchanged."""
    path, texts = (
        tmp_path / "else.db",
        (b"not a database, but long enough to be looked at" * 50, b"\0" * 5000),
    )
    for content in texts:
        await anyio.Path(path).write_bytes(content)
        with pytest.raises(CannotOpenStore, match="not a SQLite database"):
            await open_store(f"sqlite:///{path}")
        assert await anyio.Path(path).read_bytes() == content
    with pytest.raises(CannotOpenStore, match=r"nowhere/x.db: the file cannot be opened"):
        await open_store("sqlite:////nonexistent/nowhere/x.db")
    with pytest.raises(CannotOpenStore, match="is a folder"):
        await open_store(f"sqlite:///{tmp_path}")
    for option in ("mode=r0", "mode", "mode=ro&mode=rw", "timeout=5"):
        with pytest.raises(CannotOpenStore, match=r"use \?mode=ro for reading only"):
            await open_store(f"sqlite:///{tmp_path}/x.db?{option}")
    assert [each.name async for each in anyio.Path(tmp_path).iterdir()] == ["else.db"]


async def test_long_lock_raises_store_busy(tmp_path: Path) -> None:
    """A lock that is not released in time raises a retryable `StoreBusy`, and nothing is written."""
    url = f"sqlite:///{tmp_path}/busy.db"
    async with open_store(url) as patient, open_store(url, wait_seconds=0.0) as store:
        await create_conversation(patient, 1)
        connection = sqlite3.connect(tmp_path / "busy.db", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy) as busy:
            await store.create()
        assert busy.value.retryable
        assert len(await store.conversations()) == 1
        assert len(await store.search("question")) == 1  # although the index cannot be updated
        connection.execute("ROLLBACK")
        connection.close()
        await patient.create()
        assert len(await store.conversations()) == 2


async def test_import_succeeds_without_its_sums(tmp_path: Path) -> None:
    """An import that is stored reports no error if the sums cannot be written; the next statistics write them."""
    async with open_store(f"sqlite:///{tmp_path}/a.db") as store:
        row, _ = await create_conversation(store, 2)
        exported = await store.export(row)
        fail = "CREATE TRIGGER fail BEFORE UPDATE ON summed BEGIN SELECT RAISE (ABORT, 'disk'); END"
        await store.database.write(lambda tx: tx.run(fail))
        assert len(await store.import_(exported)) == 1
        assert (await analyze(store)).requests.total == 4
        await store.database.write(lambda tx: tx.run("DROP TRIGGER fail"))
        assert (await analyze(store)).requests.total == 4
        assert await store.verify() == []


async def test_cancelled_write_does_not_start(tmp_path: Path) -> None:
    """A cancelled write that is still queued is dropped; one that is running is completed."""
    async with open_store(f"sqlite:///{tmp_path}/a.db") as store:
        started, release = threading.Event(), threading.Event()
        calls: list[str] = []

        def hold(tx: Tx) -> None:
            started.set()
            assert release.wait(300)
            calls.append("first")

        first = asyncio.create_task(store.database.write(hold))
        assert await asyncio.to_thread(started.wait, 300)
        second = asyncio.create_task(store.database.write(lambda _: calls.append("second")))
        await asyncio.sleep(0)  # it is queued now
        for task in (first, second):
            task.cancel()
        for task in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await task
        release.set()
        await store.database.write(lambda _: calls.append("third"))
        assert calls == ["first", "third"]


async def test_readers_run_concurrently(tmp_path: Path) -> None:
    """A query waits neither for another query nor for a write."""
    async with open_store(f"sqlite:///{tmp_path}/a.db") as store:
        barrier = threading.Barrier(3)

        def meet(_: Tx) -> None:
            barrier.wait(300)

        database = store.database
        work = (database.read(meet), database.read(meet), database.write(meet))
        await asyncio.gather(*work)


def test_unreferenced_database_stops_its_threads(tmp_path: Path) -> None:
    """A store that is not closed leaves no threads, and errors of its operations reach the caller."""
    before = set(threading.enumerate())
    database = SQLiteDatabase(f"{tmp_path}/a.db")
    assert database.write_sync(lambda tx: tx.rows("SELECT 1")) == [(1,)]
    with pytest.raises(StoreError, match="no such table"):
        database.read_sync(lambda tx: tx.rows("SELECT * FROM missing"))
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} >= {"kedge-store-writer_0", "kedge-store-reader_0"}
    del database
    gc.collect()
    for thread in threads:
        if "kedge-store" in thread.name:
            thread.join(10)
            assert not thread.is_alive()


async def test_new_file_is_private(tmp_path: Path) -> None:
    """A new database file and its journal are readable only by their owner."""
    old = os.umask(0)
    try:
        async with open_store(f"sqlite:///{tmp_path}/new.db") as store:
            await store.create("mine")
            modes = {each.name: each.stat().st_mode & 0o777 for each in os.scandir(tmp_path)}
    finally:
        os.umask(old)
    assert modes["new.db"] == 0o600
    assert set(modes.values()) == {0o600}


async def test_new_file_behind_a_link_is_private(tmp_path: Path) -> None:
    """The store behind a link to a file that does not exist is as private as any other."""
    target = tmp_path / "disk" / "store.db"
    await anyio.Path(target.parent).mkdir()
    await anyio.Path(tmp_path / "link.db").symlink_to(target)
    old = os.umask(0)
    try:
        async with open_store(tmp_path / "link.db") as store:
            await store.create("mine")
            modes = {each.name: each.stat().st_mode & 0o777 for each in os.scandir(target.parent)}
    finally:
        os.umask(old)
    assert modes["store.db"] == 0o600
    assert set(modes.values()) == {0o600}


def remove_files(path: Path) -> None:
    """Remove a store with its journal, as ``rm store.db*`` does."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def replace_file(path: Path) -> None:
    """Replace a store by a copy, as restoring a backup does."""
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("change", [Path.unlink, remove_files, replace_file])
async def test_a_replaced_file_is_noticed(
    tmp_path: Path, change: Callable[[Path], None], server: TestServer
) -> None:
    """No write is acknowledged that goes nowhere, nothing is read from the old file, and no request is sent."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        row, nodes = await create_conversation(store, 2)
        conversation = await Conversation.create(f"responses:{server.base_url}#m", store=store)
        await conversation.send("Hello")
        change(path)
        for work in (
            store.create("lost"),
            store.append(row, nodes[-1], [user("lost")], head=nodes[-1].id),
            store.load(row),
            store.use_namespace("alice").conversations(),
            store.database.check_health(),
            TokenRegistry(store).list(),
            conversation.send("Hello again"),
        ):
            with pytest.raises(StoreReplaced, match="was removed or replaced while it was open"):
                await work
        for run_inline in (store.database.read_inline, store.database.write_inline):
            with pytest.raises(StoreReplaced):
                run_inline(lambda tx: tx.rows("SELECT 1"))
        assert len(server.requests) == 1
    async with open_store(path) as store:  # opened again, as the error says
        await store.create("kept")


@pytest.mark.parametrize("method", ["write_sync", "write_inline"])
def test_a_file_that_is_replaced_during_a_write_acknowledges_nothing(
    tmp_path: Path, method: str
) -> None:
    """The file is compared again before the result of a transaction is returned."""
    path = tmp_path / "store.db"
    database = open_current_database(f"sqlite:///{path}")
    made: list[str] = []

    def work(tx: Tx) -> None:
        tx.run("UPDATE conversations SET title = 'lost'")
        remove_files(path)
        made.append("change")

    with pytest.raises(StoreReplaced):
        getattr(database, method)(work)
    assert made == ["change"]
    database.close()


async def test_an_answer_that_cannot_be_stored_is_in_the_error(
    tmp_path: Path, server: TestServer
) -> None:
    """If the file is replaced while a model answers, the error has the Turn with the answer."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        conversation = await Conversation.create(f"responses:{server.base_url}#m", store=store)

        async def send() -> None:
            async with conversation.stream("Hello") as stream:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        remove_files(path)

        with pytest.raises(StoreReplaced) as exc_info:
            await send()
        assert exc_info.value.turn is not None
        assert [block.kind for block in exc_info.value.turn.blocks] == ["user", "assistant"]


async def test_a_revoked_token_of_a_replaced_store_is_not_valid(tmp_path: Path) -> None:
    """A token that was revoked in the file that is there now cannot be used with the old one."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        registry = TokenRegistry(store, required=False)
        token, secret = await registry.add("alice")
        session = await registry.start_session("alice", 60)
        remove_files(path)
        async with open_store(path) as other:
            assert await TokenRegistry(other).find(secret) is None
            for check in (
                registry.find(secret),
                registry.is_valid(token),
                registry.find_session(session),
                registry.count("alice", requests=1),
                registry.is_required(),
                registry.is_required(),
            ):
                with pytest.raises(StoreReplaced):
                    await check


async def test_health_after_a_full_disk(tmp_path: Path) -> None:
    """A store is unhealthy after a write has failed because the disk is full, until a write would succeed."""
    async with open_store(tmp_path / "full.db") as store:
        row = await store.create()
        await store.database.check_health()
        await store.database.write(lambda tx: tx.rows("PRAGMA max_page_count = 1"))
        with pytest.raises(StoreFull):
            await store.create(data={"text": "x" * 100_000})
        for _ in range(2):
            with pytest.raises(StoreFull):
                await store.use_namespace("alice").database.check_health()
        await store.database.write(lambda tx: tx.rows("PRAGMA max_page_count = 1000000"))
        await store.database.check_health()
        assert [each.id for each in await store.conversations()] == [row.id]
        assert await store.verify() == []


async def test_deletion_is_complete_although_the_files_cannot_be_written(tmp_path: Path) -> None:
    """An error of what follows a deletion says that it was deleted, and what to do."""
    async with open_store(f"sqlite:///{tmp_path}/full.db") as store:
        kept, _ = await create_conversation(store, 1)
        row, _ = await create_conversation(store, 1)

        def fail(vacuum: bool) -> None:
            assert vacuum in (False, True)
            raise StoreFull("the disk is full; nothing was written")

        store.database.reclaim_files = fail
        for work in (store.delete(row), store.gc()):
            with pytest.raises(
                StoreError, match="still be in the files, until 'kedge gc' succeeds"
            ):
                await work
        assert [each.id for each in await store.conversations()] == [kept.id]
