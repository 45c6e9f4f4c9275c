"""Failures of the PostgreSQL server and connection, and the errors they raise."""

import itertools
import sys
import threading
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

import anyio
import psycopg
import pytest

from kedge import errors, user
from kedge.database.postgres import PostgresDatabase, PostgresTransaction
from kedge.database.transactions import Tx
from kedge.store import ConversationRow, Node, Store, open_store
from postgresql import PASSWORD, PostgresServer
from store.sample_conversations import count_rows, create_conversation


def change_url(url: str, **parts: str) -> str:
    """Return the address with another password, port or database."""
    split = urlsplit(url)
    password = parts.get("password", split.password or "")
    netloc = f"{split.username}:{password}@{split.hostname}:{parts.get('port', split.port)}"
    return urlunsplit((split.scheme, netloc, parts.get("path", split.path), "", ""))


async def test_wrong_password_is_not_in_the_error(own_server: PostgresServer) -> None:
    """Wrong credentials raise an error that is not retryable and does not contain the password."""
    with pytest.raises(errors.CannotOpenStore, match="password") as wrong:
        await open_store(change_url(own_server.url, password="letmein"))
    assert "letmein" not in str(wrong.value)
    assert not wrong.value.retryable
    with pytest.raises(errors.CannotOpenStore, match="database is wrong") as unknown:
        await open_store(change_url(own_server.url, path="/nothing"))
    assert PASSWORD not in str(unknown.value)


async def test_no_server_is_unreachable() -> None:
    """A refused connection is retryable; its message has no password."""
    with pytest.raises(
        errors.StoreUnreachable, match=r"//127\.0\.0\.1:1/kedge: .*is it running"
    ) as exc_info:
        await open_store("postgresql://me:secret@127.0.0.1:1/kedge")
    assert exc_info.value.retryable
    assert "secret" not in str(exc_info.value)


@pytest.mark.parametrize("separator", ["/", "/x?", "/x#"])
async def test_no_part_of_an_unescaped_password_is_in_the_error(separator: str) -> None:
    """A slash that is not escaped ends the host, so that the rest of the password is a path, a query or a fragment."""
    address = f"postgresql://me:1234{separator}secret@127.0.0.1:1/kedge"
    with pytest.raises(errors.StoreError) as exc_info:
        await open_store(address, wait_seconds=0.5)
    assert "1234" not in str(exc_info.value)
    assert "secret" not in str(exc_info.value)


async def test_store_works_again_after_server_restart(own_server: PostgresServer) -> None:
    """While the server is down, operations raise `StoreUnreachable`; after a restart they work, without an error."""
    async with open_store(own_server.url, wait_seconds=2.0) as store:
        row, nodes = await create_conversation(store, 2)
        await anyio.to_thread.run_sync(own_server.stop)
        for _ in range(2):
            with pytest.raises(errors.StoreUnreachable) as exc_info:
                await store.append(row, nodes[-1], [user("lost?")], head=nodes[-1].id)
            assert exc_info.value.retryable
            assert PASSWORD not in str(exc_info.value)
        await anyio.to_thread.run_sync(own_server.start)
        with anyio.fail_after(300):
            while True:
                try:
                    node = await store.append(row, nodes[-1], [user("back")], head=nodes[-1].id)
                except (errors.StoreBusy, errors.StoreUnreachable):
                    continue
                break
        assert len((await store.load(row, node.id)).blocks) == 5
    async with open_store(own_server.url, wait_seconds=300.0) as store:
        row, nodes = await create_conversation(store, 1)
        await anyio.to_thread.run_sync(own_server.stop)
        await anyio.to_thread.run_sync(own_server.start)
        node = await store.append(row, nodes[-1], [user("still here")], head=nodes[-1].id)
        assert len((await store.load(row, node.id)).blocks) == 3


async def test_unconfirmed_commit(empty_schema: str) -> None:
    """An unconfirmed commit is not retryable, and the message advises to check whether it was written."""
    async with open_store(empty_schema) as store:

        def work(tx: Tx) -> None:
            ((pid,),) = tx.rows("SELECT pg_backend_pid()")
            with psycopg.connect(empty_schema) as other:
                other.execute("SELECT pg_terminate_backend(%s, 30000)", (pid,))

        with pytest.raises(
            errors.StoreUnreachable, match="check whether it was written"
        ) as unknown:
            await store.database.write(work)
        assert not unknown.value.retryable
        assert len(await store.conversations()) == 0


async def test_every_connection_busy(empty_schema: str) -> None:
    """An operation that waits too long raises `StoreBusy`, which is retryable."""
    async with open_store(empty_schema) as store:
        await create_conversation(store, 1)
    database = PostgresDatabase(empty_schema, connections=1, wait_seconds=60.0)
    store = Store(database)
    locked, done = threading.Event(), threading.Event()

    def hold(tx: Tx) -> None:
        tx.rows("SELECT 1")
        locked.set()
        done.wait(300)

    async with anyio.create_task_group() as group:
        group.start_soon(store.database.read, hold)
        await anyio.to_thread.run_sync(locked.wait, 300)
        database.wait_seconds = 0.01
        with pytest.raises(errors.StoreBusy, match="every connection was busy") as busy:
            await store.conversations()
        assert busy.value.retryable
        database.wait_seconds = 60.0
        done.set()
    assert len(await store.conversations()) == 1
    await store.aclose()


async def test_errors_of_the_server(empty_schema: str) -> None:
    """A read-only database can be read; other errors have the message of PostgreSQL, and a NUL is no outage."""
    async with open_store(empty_schema) as store:
        await create_conversation(store, 1)
    async with open_store(empty_schema) as store:
        with pytest.raises(
            errors.StoreError, match=r"PostgreSQL reports: relation .* does not exist"
        ):
            await store.database.read(lambda tx: tx.rows("SELECT * FROM nothing"))
    async with open_store(empty_schema) as store:
        for attempt in (store.conversation("a\0b"), store.conversations(tag="\0")):
            with pytest.raises(errors.InvalidSetting, match="contains a NUL character; remove it"):
                await attempt
    async with open_store(f"{empty_schema}%20-cdefault_transaction_read_only%3Don") as store:
        assert len(await store.conversations()) == 1
        with pytest.raises(errors.StoreReadOnly, match="nothing was written"):
            await store.create()


async def test_missing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional dependency, the message names the extra to install."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(errors.CannotOpenStore, match=r"pip install 'kedge-llm\[postgres\]'"):
        await open_store("postgresql://localhost/kedge")


async def test_concurrent_appends_to_one_node(empty_schema: str) -> None:
    """Each of many concurrent appends to one node gets its own branch."""
    async with open_store(empty_schema) as store:
        row, nodes = await create_conversation(store, 1)
        numbers: list[int] = []

        async def write(number: int) -> None:
            node = await store.append(row, nodes[-1], [user(f"branch {number}")])
            numbers.append(node.id)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(write, number)
        assert len(set(numbers)) == 12
        tree = {node.id: node for node in await store.tree(row)}
        assert len({tree[node].branch for node in numbers}) == 12
        assert await store.verify() == []


async def test_delete_during_concurrent_writes(empty_schema: str) -> None:
    """Writers to a deleted conversation get `NotInStore`, no rows remain, and there is no deadlock."""
    async with open_store(empty_schema) as store:
        stopped: list[str] = []

        async def write(row: ConversationRow, node: Node, is_writing: anyio.Event) -> None:
            shared = user("the same for all", id="blk_shared")
            for number in itertools.count():
                blocks = [user(f"{row.id} {number}")] if number % 3 else [shared]
                head = node.id if number % 2 else None
                try:
                    with suppress(errors.HeadConflict):
                        node = await store.append(row, node, blocks, head=head)
                except errors.NotInStore:
                    stopped.append(row.id)
                    return
                if number == 5:
                    is_writing.set()

        async def end(row: ConversationRow, is_writing: anyio.Event) -> None:
            await is_writing.wait()
            await store.delete(row.id)

        with anyio.fail_after(300):
            async with anyio.create_task_group() as group:
                for _ in range(6):
                    row, is_writing = await store.create(), anyio.Event()
                    root = (await store.load(row)).node
                    group.start_soon(write, row, root, is_writing)
                    group.start_soon(end, row, is_writing)
        assert len(stopped) == 6
        assert await count_rows(store, "nodes", "links", "blocks", "responses") == [0, 0, 0, 0]


async def test_a_lock_of_another_program_does_not_block(empty_schema: str) -> None:
    """While another session locks the links, a send and a deletion fail after ``wait_seconds``."""
    async with open_store(empty_schema) as store:
        row, nodes = await create_conversation(store, 1)
        database = store.database
        assert isinstance(database, PostgresDatabase)
        with psycopg.connect(empty_schema) as other, anyio.fail_after(300):
            other.execute("LOCK TABLE links IN SHARE MODE")
            database.wait_seconds = 0.1
            for attempt in (
                store.append(row, nodes[-1], [user("blocked")], head=nodes[-1].id),
                store.delete(row.id),
            ):
                with pytest.raises(errors.StoreBusy, match="held a lock for too long"):
                    await attempt
        database.wait_seconds = 300.0
        await store.append(row, nodes[-1], [user("sent")], head=nodes[-1].id)
        await store.delete(row.id)


async def test_long_operations_have_no_limit_for_statements(
    empty_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import, export, gc and verify remove the limit for their statements, also that of the role."""
    calls: list[str] = []
    allow = PostgresTransaction.allow_long_statements

    def record(tx: PostgresTransaction) -> None:
        allow(tx)
        calls.append(tx.rows("SHOW statement_timeout")[0][0])

    async with open_store(empty_schema) as store:
        row, _ = await create_conversation(store, 1)
        lines = await store.export(row)
        monkeypatch.setattr(PostgresTransaction, "allow_long_statements", record)
        for call in (store.import_(lines), store.export(row), store.gc(), store.verify()):
            calls.clear()
            await call
            assert set(calls) == {"0"}
