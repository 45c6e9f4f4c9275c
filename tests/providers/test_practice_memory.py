"""Test the practice model's responses in a store: shared, deleted with their conversations, and optional."""

import json
from pathlib import Path

import pytest
from openai import OpenAI

from kedge._internal.event_loops import run_sync
from kedge.conversation import Conversation
from kedge.planning import Mode
from kedge.providers import practice_memory
from kedge.providers.practice_memory import (
    find_missing_responses,
    get_embedded_server,
    store_practice_memory,
)
from kedge.store import ConversationRow, Store, open_store
from kedge.testing import serve
from postgresql import ReusableStore


async def converse(
    store: Store, *messages: str, mode: Mode = "chained"
) -> tuple[ConversationRow, list[str]]:
    """Send messages in a new conversation; return its row and the ids of the responses."""
    async with await Conversation.create("practice", store=store) as conversation:
        for message in messages:
            await conversation.send(message, mode=mode)
        responses = await conversation.responses()
        row = await store.conversation(conversation.id)
        return row, [each.provider_response_id for each in responses]


def send_messages(store_url: str, *messages: str, mode: Mode = "chained") -> list[str]:
    """Send messages in a new conversation of a store, and return the ids of the responses."""

    async def work() -> list[str]:
        async with open_store(store_url) as store:
            return (await converse(store, *messages, mode=mode))[1]

    return run_sync(work())


def read_files(folder: Path) -> bytes:
    """Return the content of all files in a folder."""
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_the_store_is_the_only_file(tmp_path: Path) -> None:
    """The responses are in the file of the conversations, which is complete after a copy."""
    store, copy = tmp_path / "store.db", tmp_path / "copy.db"
    with store_practice_memory(store):
        response_ids = send_messages(f"sqlite:///{store}", "Hello")
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]
    copy.write_bytes(store.read_bytes())
    with store_practice_memory(copy):
        assert find_missing_responses(response_ids) == set()


def test_unusable_store_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The responses are then stored only while the process runs, and everything else works."""
    problems: list[str] = []
    with store_practice_memory(tmp_path, problems.append):
        assert len(send_messages("sqlite://:memory:", "Hello")) == 1
    assert "only while this process runs" in problems[0]
    assert str(tmp_path) in problems[0]
    with store_practice_memory(tmp_path):
        get_embedded_server()
    assert "only while this process runs" in caplog.text


async def test_deletion_is_one_transaction(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that fails at its end deletes nothing; one that succeeds deletes the responses of all modes."""

    def fail(*_: object) -> None:
        raise OSError("cut off")

    async with open_store(store_url) as store:
        with store_practice_memory(store_url):
            row, deleted = await converse(store, "b goes", "c goes")
            other, _ = await converse(store, "d goes", mode="conversation")
            user = store.use_namespace("alice")
            _, kept = await converse(user, "a stays")
            with monkeypatch.context() as patch:
                patch.setattr("kedge.store.database.responses.find_empty_conversations", fail)
                with pytest.raises(OSError, match="cut off"):
                    await store.delete(row)
            assert find_missing_responses([*kept, *deleted]) == set()
            await store.delete(row)
            await store.delete(other)
            assert find_missing_responses([*kept, *deleted]) == set(deleted)
        query = "SELECT input FROM practice_nodes"
        content = b"".join(
            bytes(text) for (text,) in await store.database.read(lambda tx: tx.rows(query))
        )
        assert b"a stays" in content
        assert b" goes" not in content
        empty = "SELECT id FROM practice_conversations"
        assert await store.database.read(lambda tx: tx.rows(empty)) == []
        assert await store.verify() == []


async def test_deleted_text_is_in_no_file(tmp_path: Path) -> None:
    """Deleted responses are overwritten on disk; ``gc`` deletes those that no conversation has."""
    store_url = f"sqlite:///{tmp_path}/store.db"
    with store_practice_memory(store_url):
        send_messages("sqlite://:memory:", "an interrupted answer")
        async with open_store(store_url) as store:
            row, _ = await converse(store, "b goes")
            await converse(store, "a stays")
            assert b"interrupted" in read_files(tmp_path)
            await store.gc()
            assert b"interrupted" not in read_files(tmp_path)
            await store.delete(row)
            assert b"a stays" in read_files(tmp_path)
            assert b"b goes" not in read_files(tmp_path)


async def test_forks_keep_the_responses_that_they_use(store_url: str) -> None:
    """After the deletion of its origin, a fork continues from the common response."""
    async with open_store(store_url) as store:
        with store_practice_memory(store_url):
            row, ids = await converse(store, "My name is Ada.")
            fork = await store.fork(row, row.head)
            await store.delete(row)
            assert find_missing_responses(ids) == set()
            async with Conversation("practice", store=store, id=fork.id) as conversation:
                assert "Ada" in (await conversation.send("What is my name?")).text
                assert (await conversation.responses())[-1].anchor == ids[0]


def test_server_on_the_same_database(postgres_store: ReusableStore) -> None:
    """A server on the same database neither finds the responses of the practice model nor loses its own."""

    async def delete_all() -> None:
        async with open_store(store_url) as store:
            for row in await store.conversations():
                await store.delete(row)
            assert await store.verify() == []

    with (
        postgres_store.borrow() as store_url,
        store_practice_memory(store_url),
        serve(db=store_url) as server,
        OpenAI(base_url=server.base_url, api_key="x") as client,
    ):
        own = client.responses.create(model="m", input="Hello").id
        (practice,) = send_messages(store_url, "Hello")
        assert find_missing_responses([own, practice]) == {own}
        run_sync(delete_all())
        assert find_missing_responses([practice]) == {practice}
        assert client.responses.retrieve(own).id == own


def test_size_limit_is_for_responses_only(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size limit applies to the responses of the practice model, not to the rest of the store."""
    monkeypatch.setattr(practice_memory, "MAX_MEMORY_BYTES", 100_000)

    async def fill() -> None:
        async with open_store(store_url) as store:
            row = await store.create(data={"text": "x" * 500_000})
            assert row.number

    with store_practice_memory(store_url):
        run_sync(fill())
        kept = send_messages(store_url, "Hello")
        assert get_embedded_server().call(lambda state: state.purge()) == 0
        assert find_missing_responses(kept) == set()
        send_messages(store_url, "x" * 150_000)
        assert get_embedded_server().call(lambda state: state.purge()) > 0
        assert find_missing_responses(kept) == set(kept)


async def test_verify_reports_damaged_responses(store_url: str) -> None:
    """Responses without a parent, conversation objects without their end and items that cannot be read are damage."""
    async with open_store(store_url) as store:
        with store_practice_memory(store_url):
            await converse(store, "one", "two")
            await converse(store, "three", mode="conversation")
        assert await store.verify() == []
        damage = (
            "UPDATE practice_nodes SET input = ? WHERE id = (SELECT MIN(id) FROM practice_nodes)"
        )
        await store.database.write(lambda tx: tx.run(damage, (b"{",)))
        (found,) = await store.verify()
        assert found.problem == "its items cannot be read"
        if store.database.dialect.name == "postgresql":  # has foreign keys
            return
        await store.database.write(
            lambda tx: tx.run(
                "DELETE FROM practice_nodes WHERE id IN (SELECT MIN(id) FROM practice_nodes)"
            )
        )
        await store.database.write(
            lambda tx: tx.run("UPDATE practice_conversations SET node = 999")
        )
        problems = {each.problem for each in await store.verify()}
        assert problems == {"its parent is missing", "its last node is missing"}


async def test_responses_are_not_exported(store_url: str) -> None:
    """An export has the conversation, and not what the practice model has stored for it."""
    async with open_store(store_url) as store:
        with store_practice_memory(store_url):
            row, _ = await converse(store, "Hello")
            exported = await store.export(row)
        assert {next(iter(json.loads(line))) for line in exported.splitlines()} == {
            "format",
            "block",
            "node",
        }
