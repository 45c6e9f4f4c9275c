"""Tests that databases, chat states and Turn JSON written by version 0.1 stay readable and usable."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from kedge import Chat, Conversation, open_store
from kedge.errors import NotInStore
from kedge.store import TokenRegistry
from kedge.testing import serve
from kedge.turns import dumps, loads

DATA = Path(__file__).parent / "data" / "v0_1"
FACTS: dict[str, Any] = json.loads((DATA / "facts.json").read_text())


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """Return the URL of a copy of the 0.1 store, because opening it may upgrade it."""
    shutil.copy(DATA / "store.db", tmp_path / "store.db")
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.mark.parametrize("title", FACTS["conversations"])
async def test_a_conversation_is_loaded_and_continued(store_url: str, title: str) -> None:
    """Every conversation has its blocks, answers a new message, and the store stays valid."""
    known = FACTS["conversations"][title]
    async with await open_store(store_url) as store:
        assert await store.verify() == []
        conversation = await Conversation.open(store, known["id"], "practice")
        assert len(conversation.turn) == known["blocks"]
        assert getattr(conversation.turn[-1], "text", "") == known["text"]
        reply = await conversation.send("What is 2+3?")
        assert reply.text == "2+3 = 5."
        assert len(conversation.turn) == known["blocks"] + 2
        assert await store.verify() == []


async def test_deleted_conversations_are_not_found_by_search(store_url: str) -> None:
    """The search index of 0.1 is used and extended, and deleted text is not in it."""
    async with await open_store(store_url) as store:
        known = {each["id"] for each in FACTS["conversations"].values()}
        assert {hit.conversation for hit in await store.search("ship")} <= known
        assert len(await store.search("Terror")) == 2
        assert await store.search("gone") == []
        row = await store.conversation(FACTS["conversations"]["Another ship"]["id"])
        assert "edited" in {node.kind for node in await store.tree(row)}


async def test_row_numbers_of_0_1_are_not_used_again(store_url: str) -> None:
    """A row read before its conversation was deleted does not refer to a later conversation."""
    async with await open_store(store_url) as store:
        newest = max(await store.conversations(archived=None), key=lambda row: row.number)
        await store.delete(newest)
        created = await store.create()
        assert created.number > newest.number
        with pytest.raises(NotInStore):
            await store.load(newest)
        assert await store.verify() == []


async def test_rows_of_0_1_belong_to_the_administrator(store_url: str, tmp_path: Path) -> None:
    """No other user sees the conversations of the store, or the responses of the server."""
    shutil.copy(DATA / "server.db", tmp_path / "server.db")
    first, conversation = FACTS["responses"][0], FACTS["conversation"]
    async with await open_store(store_url) as store:
        assert await store.namespaces() == []
        alice = store.use_namespace("alice")
        assert await alice.conversations(archived=None) == []
        assert await alice.search("ship") == []
        registry = TokenRegistry(store)
        _, secret = await registry.add("alice")
        settings: dict[str, Any] = {"db": str(tmp_path / "server.db"), "token": "admin"}
        with serve(callers=registry, retention=36_500 * 86_400.0, **settings) as server:
            statuses = {
                token: [
                    httpx2.get(
                        f"{server.base_url}/{path}",
                        headers={"authorization": f"Bearer {token}"},
                        verify=False,
                        timeout=300,
                    ).status_code
                    for path in (f"responses/{first}", f"conversations/{conversation}")
                ]
                for token in ("admin", secret)
            }
        assert statuses == {"admin": [200, 200], secret: [404, 404]}


async def test_a_key_of_0_1_still_deduplicates(store_url: str) -> None:
    """A message sent with the same idempotency key returns the stored reply."""
    async with await open_store(store_url) as store:
        known = FACTS["conversations"]["Ships"]
        conversation = await Conversation.open(store, known["id"], "practice")
        reply = await conversation.send("Please call add with a=2 and b=3", key="sum-1")
        assert reply.stored


async def test_an_export_is_imported(tmp_path: Path) -> None:
    """Lines written by `kedge export` 0.1 become a conversation with the same blocks."""
    lines = (DATA / "export.jsonl").read_text().splitlines()
    async with await open_store(f"sqlite:///{tmp_path / 'new.db'}") as store:
        (row,) = await store.import_(lines)
        loaded = await store.load(row)
        assert len(loaded.turn(row.id)) == FACTS["conversations"]["Ships"]["blocks"]
        assert await store.verify() == []


async def test_a_chat_state_is_continued() -> None:
    """A plain and an encrypted state are continued with their blocks."""
    async with Chat("practice") as chat:
        state = (DATA / "state_v2.txt").read_bytes()
        assert chat.inspect_state(state).blocks == FACTS["state_blocks"]
        answer = await chat.chat_with_state(state, "What is my name?")
        assert answer.text == "Your name is Ada."
    async with Chat("practice", key=FACTS["key"]) as chat:
        state = (DATA / "state_v2_encrypted.txt").read_bytes()
        answer = await chat.chat_with_state(state, "What is my name?")
        assert answer.text == "Your name is Ada."


def test_turn_json_is_read_and_written_back() -> None:
    """The JSON form of a Turn is unchanged after loading and writing it."""
    text = (DATA / "turn.json").read_text()
    assert json.loads(dumps(loads(text))) == json.loads(text)


def test_a_server_database_is_served(tmp_path: Path) -> None:
    """Responses and conversation objects stored by the 0.1 server can be retrieved and chained on."""
    shutil.copy(DATA / "server.db", tmp_path / "server.db")
    # The fixture's responses must not have expired, whatever today's date is.
    with (
        serve(db=str(tmp_path / "server.db"), retention=36_500 * 86_400.0) as server,
        openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client,
    ):
        first, second = FACTS["responses"]
        assert client.responses.retrieve(first).id == first
        third = client.responses.create(
            model="practice", input="What did I say first?", previous_response_id=second
        )
        assert third.output_text == 'You said first: "My name is Ada."'
        assert client.conversations.retrieve(FACTS["conversation"]).id == FACTS["conversation"]


@pytest.fixture
def encrypted_client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """Yield a client of a server whose database has content encrypted by version 0.1."""
    shutil.copy(DATA / "server_encrypted.db", tmp_path / "server.db")
    with (
        serve(db=str(tmp_path / "server.db"), retention=36_500 * 86_400.0) as server,
        openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client,
    ):
        yield client


def test_content_encrypted_by_0_1_is_rejected(encrypted_client: openai.OpenAI) -> None:
    """Encrypted reasoning and compaction items give the error on which clients resend without them."""
    known = FACTS["encrypted"]
    message = {"role": "user", "content": "What is 2+3?"}
    for items in (
        [message, known["reasoning"], known["answer"], message],
        [known["item"], message],
    ):
        with pytest.raises(openai.BadRequestError) as exc_info:
            encrypted_client.responses.create(model="practice", input=items)
        assert exc_info.value.code == "invalid_encrypted_content"


def test_a_context_compacted_by_0_1_is_not_found(encrypted_client: openai.OpenAI) -> None:
    """Chaining on a compacted response gives the error on which clients resend; it can still be retrieved."""
    known = FACTS["encrypted"]
    for response in (known["compacted"], known["after"]):
        assert encrypted_client.responses.retrieve(response).status == "completed"
        with pytest.raises(openai.BadRequestError) as exc_info:
            encrypted_client.responses.create(
                model="practice", input="Hello.", previous_response_id=response
            )
        assert exc_info.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError, match="Conversation with id"):
        encrypted_client.responses.create(
            model="practice", input="Hello.", conversation=known["conversation"]
        )
