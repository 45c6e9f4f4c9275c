"""The server state compared with a simple model: chains, forks, deletion, expiry, conversations.

After any sequence of operations, the context of a live response equals that of the model, an expired or
deleted response is not found, and nodes that are no longer needed are deleted.
"""

import asyncio
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kedge._internal.json_text import decode
from kedge.server.encrypted_content import ReasoningPayload
from kedge.server.errors import ApiError
from kedge.server.object_forms import normalize_items
from kedge.server.response_run import ResponseRun
from kedge.server.settings import DAY, Limits, Settings
from kedge.server.state import ServerState
from postgresql import create_schema
from server.conftest import count_nodes, prepare_draft
from strategies import scale_examples

words = st.text("abc", min_size=1, max_size=3)


def item_texts(items: Any) -> list[str]:
    return [item["content"][0]["text"] for item in items]


@dataclass
class ExpectedResponse:
    """The expected state of one response."""

    texts: list[str]
    expires_at: float
    deleted: bool = False


@dataclass
class ExpectedConversation:
    """The expected state of one conversation: the ids and texts of its items."""

    items: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    deleted: bool = False


class ServerStateMachine(RuleBasedStateMachine):
    """Random operations on a server."""

    responses = Bundle("responses")
    conversations = Bundle("conversations")

    def __init__(self, postgres_url: str = "") -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.db = postgres_url or str(Path(self.folder.name) / "server.db")
        self.now = 1000.0
        self.expected_responses: dict[str, ExpectedResponse] = {}
        self.expected_conversations: dict[str, ExpectedConversation] = {}
        self.open()

    def open(self) -> None:
        """Start a server on the database with a small cache."""
        options: Any = {"retention": 10 * DAY, "limits": Limits(cache_bytes=15_000)}
        self.service = ServerState.open(Settings(db=self.db, clock=lambda: self.now, **options))

    def teardown(self) -> None:
        """Delete everything and stop."""
        for id_ in self.expected_conversations:
            if stored := self.service.conversations.find(id_):
                self.service.conversations.delete(stored)
        self.service.responses.delete_all()
        assert count_nodes(self.service) == 0
        self.service.close()
        self.folder.cleanup()

    def create_response(self, **body: Any) -> dict[str, Any]:
        """Create a response without HTTP."""

        def prepare() -> ResponseRun:
            return ResponseRun(self.service, prepare_draft(self.service, {"model": "m", **body}))

        async def discard(_: object) -> None:
            pass

        async def answered() -> bytes:
            run = await self.service.run(prepare)
            await run.run(discard)
            if run.error is not None:
                raise run.error
            assert run.is_complete
            return run.serialize()

        return decode(asyncio.run(answered()))

    def expect(self, response: dict[str, Any], texts: list[str]) -> str:
        """Expect that a new response exists for ten days, with this context; return its id."""
        self.expected_responses[response["id"]] = ExpectedResponse(texts, self.now + 10 * DAY)
        return response["id"]

    def is_alive(self, id_: str) -> bool:
        """Return whether a response is expected to exist."""
        response = self.expected_responses[id_]
        return not response.deleted and response.expires_at > self.now

    @rule(target=responses, word=words, store=st.booleans())
    def begin(self, word: str, store: bool) -> Any:
        """Start a chain."""
        response = self.create_response(input=word, store=store)
        if not store:
            return multiple()
        return self.expect(response, [word, *item_texts(response["output"])])

    @rule(target=responses, previous=responses, word=words)
    def chain(self, previous: str, word: str) -> Any:
        """Continue any response."""
        if not self.is_alive(previous):
            with pytest.raises(ApiError, match=r"Previous response with id .* not found"):
                self.create_response(input=word, previous_response_id=previous)
            return multiple()
        response = self.create_response(input=word, previous_response_id=previous)
        texts = self.expected_responses[previous].texts
        return self.expect(response, [*texts, word, *item_texts(response["output"])])

    @rule(id_=responses)
    def delete(self, id_: str) -> None:
        """Delete a response."""
        stored = self.service.responses.find(id_)
        assert (stored is not None) == self.is_alive(id_)
        if stored is not None:
            self.service.responses.delete(stored[0])
            self.expected_responses[id_].deleted = True

    @rule(days=st.integers(1, 6))
    def wait(self, days: int) -> None:
        """Advance the clock."""
        self.now += days * DAY

    @rule()
    def purge(self) -> None:
        """Delete expired responses."""
        self.service.responses.purge()

    @rule()
    def restart(self) -> None:
        """Stop and start again."""
        self.service.close()
        self.open()

    @rule(target=conversations, word=words)
    def converse(self, word: str) -> str:
        """Create a conversation with one item."""
        key, items = self.items(word)
        conversation = self.service.conversations.create({}, key, items)
        expected = ExpectedConversation([(items[0]["id"], word)])
        self.expected_conversations[conversation.id] = expected
        return conversation.id

    @rule(target=responses, conversation=conversations, word=words, store=st.booleans())
    def respond(self, conversation: str, word: str, store: bool) -> Any:
        """Create a response in a conversation."""
        known = self.expected_conversations[conversation]
        response = self.create_response(input=word, conversation=conversation, store=store)
        if not store:
            return multiple()
        stored = self.service.conversations.find(conversation)
        assert stored is not None
        new = self.service.conversations.items(stored)[len(known.items) :]
        known.items += [(item["id"], item["content"][0]["text"]) for item in new]
        assert [text for _, text in known.items[-2:]] == [word, *item_texts(response["output"])]
        return self.expect(response, [text for _, text in known.items])

    @rule(conversation=conversations, word=words)
    def add(self, conversation: str, word: str) -> None:
        """Add an item to a conversation."""
        stored = self.service.conversations.find(conversation)
        if stored is not None:
            key, items = self.items(word)
            self.service.conversations.add(stored, key, items)
            self.expected_conversations[conversation].items.append((items[0]["id"], word))

    @rule(conversation=conversations, index=st.integers(0, 20))
    def remove(self, conversation: str, index: int) -> None:
        """Remove an item from a conversation."""
        stored = self.service.conversations.find(conversation)
        known = self.expected_conversations[conversation]
        if stored is not None and known.items:
            id_, _ = known.items.pop(index % len(known.items))
            assert self.service.conversations.remove(stored, id_)

    @rule(conversation=consumes(conversations))
    def drop(self, conversation: str) -> None:
        """Delete a conversation."""
        stored = self.service.conversations.find(conversation)
        assert stored is not None
        self.service.conversations.delete(stored)
        self.expected_conversations[conversation].deleted = True

    def items(self, word: str) -> tuple[str, list[Any]]:
        """Return a key and one normalized message."""
        key = self.service.nodes.new_key()
        return key, list(normalize_items([{"role": "user", "content": word}], key))

    @invariant()
    def contexts_match_the_expected_items(self) -> None:
        """Live responses and conversations have exactly the expected items."""
        for id_, expected in self.expected_responses.items():
            stored_response = self.service.responses.find(id_)
            assert (stored_response is not None) == self.is_alive(id_)
            if stored_response is not None:
                context = self.service.nodes.load_context(stored_response[0])
                assert item_texts(context.list_items()) == expected.texts
        for id_, conversation in self.expected_conversations.items():
            stored = self.service.conversations.find(id_)
            assert (stored is None) == conversation.deleted
            if stored is not None:
                items = self.service.conversations.items(stored)
                found = zip([item["id"] for item in items], item_texts(items), strict=True)
                assert list(found) == conversation.items

    @invariant()
    def no_unneeded_nodes_are_stored(self) -> None:
        """Without responses and conversations there are no nodes."""
        undeleted = any(not expected.deleted for expected in self.expected_responses.values())
        if not undeleted and all(
            conversation.deleted or not conversation.items
            for conversation in self.expected_conversations.values()
        ):
            assert count_nodes(self.service) == 0


def test_state_machine_on_postgresql(postgres_url: str) -> None:
    """The same operations are correct on a PostgreSQL database."""
    with create_schema(postgres_url) as url:
        machine: Any = partial(ServerStateMachine, url)
        steps = settings(max_examples=scale_examples(3), stateful_step_count=15)
        run_machine(machine, settings=steps)


TestServerState = ServerStateMachine.TestCase
TestServerState.settings = settings(
    max_examples=scale_examples(10), stateful_step_count=30, deadline=None
)


def test_reasoning_texts_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning is found by item id or decrypted; above the limit, old texts are dropped."""
    monkeypatch.setattr("kedge.server.state.MAX_REASONING_TEXTS", 2)
    state = ServerState.open(Settings())
    items = [{"type": "reasoning", "id": f"rs_{n}"} for n in range(3)]
    state.remember_reasoning([{"type": "message", "id": "msg_1"}, *items], ["a", "b", "c"])
    assert [state.read_reasoning(item) for item in items] == ["", "b", "c"]
    encrypted = state.cipher.encrypt(ReasoningPayload("d", None, False).to_json())
    assert state.read_reasoning({"id": "rs_9", "encrypted_content": encrypted}) == "d"
    assert state.read_reasoning({"id": "rs_9", "encrypted_content": "x"}) == ""
    state.close()
