"""Failures of the PostgreSQL server and connection, and the errors they raise."""

import itertools
import sys
from contextlib import suppress

import anyio
import pytest

from for_each import for_each
from kedge import errors, user
from kedge.store import ConversationRow, Node, open_store
from kedge.store.database.postgres import PostgresTransaction
from store.sample_conversations import count_rows, create_conversation


@for_each("separator", ["", "/", "/x?", "/x#"])
async def test_no_part_of_a_password_is_in_the_error(separator: str) -> None:
    """A slash that is not escaped ends the host, so that the rest of the password is a path, a query or a fragment."""
    address = f"postgresql://me:1234{separator}secret@127.0.0.1:1/kedge"
    with pytest.raises(errors.StoreError) as exc_info:
        await open_store(address, wait_seconds=0.5)
    assert "1234" not in str(exc_info.value)
    assert "secret" not in str(exc_info.value)
    if not separator:
        assert "//127.0.0.1:1/kedge: " in str(exc_info.value)
        assert isinstance(exc_info.value, errors.StoreUnreachable)
        assert exc_info.value.retryable


async def test_errors_of_the_server(empty_schema: str) -> None:
    """A read-only database can be read; other errors have the message of PostgreSQL, and a NUL is no outage."""
    async with open_store(empty_schema) as store:
        await create_conversation(store, 1)
        with pytest.raises(
            errors.StoreError, match=r"PostgreSQL reports: relation .* does not exist"
        ):
            await store.database.read(lambda tx: tx.rows("SELECT * FROM nothing"))
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


async def test_delete_during_concurrent_writes(empty_schema: str) -> None:
    """Writers to a deleted conversation get `NotInStore`, no rows remain, and there is no deadlock."""
    async with open_store(empty_schema) as store:
        stopped: list[str] = []

        async def write(row: ConversationRow, node: Node, is_writing: anyio.Event) -> None:
            for number in itertools.count():
                shared = user("the same for all", id=f"blk_shared_{number}")
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
