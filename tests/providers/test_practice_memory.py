"""Test the practice model's responses stored in a file: shared, erasable, and optional."""

from pathlib import Path

import pytest

from kedge.conversation import Conversation
from kedge.event_loops import run_sync
from kedge.planning import Mode
from kedge.providers.practice_memory import (
    erase_deleted,
    erase_practice_memory,
    find_missing_responses,
    get_embedded_server,
    store_practice_memory,
)
from kedge.store import Store, open_store


async def converse(store: Store, *messages: str, mode: Mode = "chained") -> list[str]:
    """Send messages in a new conversation, and return the ids of the responses."""
    async with await Conversation.create("practice", store=store) as conversation:
        for message in messages:
            await conversation.send(message, mode=mode)
        return [row.provider_response_id for row in await conversation.responses()]


def send_messages(*messages: str, mode: Mode = "chained") -> list[str]:
    async def work() -> list[str]:
        async with open_store("sqlite://:memory:") as store:
            return await converse(store, *messages, mode=mode)

    return run_sync(work())


def test_stored_responses_are_found_by_a_later_server(tmp_path: Path) -> None:
    """The embedded server of a file ends with the block, and the next one has its responses."""
    file = tmp_path / "practice.db"
    with store_practice_memory(file):
        first = get_embedded_server()
        response_ids = send_messages("Hello")
        assert get_embedded_server() is first
    assert find_missing_responses(response_ids) == set(response_ids)
    with store_practice_memory(file):
        assert get_embedded_server() is not first
        assert find_missing_responses(response_ids) == set()


def test_a_file_that_cannot_be_used_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The responses are then stored only while the process runs, and everything else works."""
    problems: list[str] = []
    with store_practice_memory(tmp_path, problems.append):
        assert len(send_messages("Hello")) == 1
    assert "only while this process runs" in problems[0]
    assert str(tmp_path) in problems[0]
    with store_practice_memory(tmp_path):
        get_embedded_server()
    assert "only while this process runs" in caplog.text


async def erase_nothing() -> None:
    """Call `erase_deleted` without a file, when there is nothing to erase."""
    async with open_store("sqlite://:memory:") as store:
        await erase_deleted(store)


def test_erasing_deletes_all_other_responses(tmp_path: Path) -> None:
    """Responses and conversation objects are deleted from the disk, not only from the index."""
    file = tmp_path / "practice.db"
    erase_practice_memory(file, ())
    assert not file.exists()
    with store_practice_memory(file):
        left = send_messages("a stays")
        deleted = send_messages("b goes", "c goes")
        send_messages("d goes", mode="conversation")
    erase_practice_memory(file, left)
    run_sync(erase_nothing())
    with store_practice_memory(file):
        assert find_missing_responses([*left, *deleted]) == set(deleted)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"a stays" in content
    assert b" goes" not in content
