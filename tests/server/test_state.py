"""The whole state against a plain model of it: chains, forks, deletion, expiry, conversations.

Whatever is done in whatever order, a live response's context is what a dictionary of lists says it
is, a dead one cannot be found, and when nothing needs them any more no nodes are left.
"""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kedge.server.answering import Run
from kedge.server.draft import draft
from kedge.server.errors import ApiError
from kedge.server.ids import new_key
from kedge.server.items import written_out
from kedge.server.service import Service
from kedge.server.settings import DAY, Limits, Settings
from kedge.server.wire import decode

words = st.text("abc", min_size=1, max_size=3)


def texts(items: Any) -> list[str]:
    return [item["content"][0]["text"] for item in items]


@dataclass
class Said:
    """What the model of the state knows of one response."""

    texts: list[str]
    expires_at: float
    deleted: bool = False


@dataclass
class Talk:
    """What it knows of one conversation: the ids and texts of its items."""

    items: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    deleted: bool = False


class ServerState(RuleBasedStateMachine):
    """Random lives of a server."""

    responses = Bundle("responses")
    conversations = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1000.0
        self.said: dict[str, Said] = {}
        self.talks: dict[str, Talk] = {}
        self.open()

    def open(self) -> None:
        """Start a server on the database, with hardly any room for a cache."""
        self.service = Service(
            Settings(
                db=str(Path(self.folder.name) / "server.db"),
                clock=lambda: self.now,
                retention=10 * DAY,
                limits=Limits(cache_bytes=15_000),
            )
        )

    def teardown(self) -> None:
        """Stop it."""
        self.service.close()
        self.folder.cleanup()

    def ask(self, **body: Any) -> dict[str, Any]:
        """Create a response, without the HTTP around it."""

        async def answered() -> bytes | None:
            run = Run(self.service, draft(self.service, {"model": "m", **body}))
            return await run.whole(watch=lambda: None)

        whole = asyncio.run(answered())
        assert whole is not None
        return decode(whole)

    def alive(self, id_: str) -> bool:
        """Whether a response should be there."""
        said = self.said[id_]
        return not said.deleted and said.expires_at > self.now

    @rule(target=responses, word=words, store=st.booleans())
    def begin(self, word: str, store: bool) -> Any:
        """Start a chain."""
        made = self.ask(input=word, store=store)
        if not store:
            return multiple()
        self.said[made["id"]] = Said([word, *texts(made["output"])], self.now + 10 * DAY)
        return made["id"]

    @rule(target=responses, previous=responses, word=words)
    def chain(self, previous: str, word: str) -> Any:
        """Go on from any response."""
        if not self.alive(previous):
            with pytest.raises(ApiError, match=r"Previous response with id .* not found"):
                self.ask(input=word, previous_response_id=previous)
            return multiple()
        made = self.ask(input=word, previous_response_id=previous)
        past = self.said[previous].texts
        self.said[made["id"]] = Said([*past, word, *texts(made["output"])], self.now + 10 * DAY)
        return made["id"]

    @rule(id_=responses)
    def delete(self, id_: str) -> None:
        """Delete a response."""
        found = self.service.responses.find(id_)
        assert (found is not None) == self.alive(id_)
        if found is not None:
            self.service.responses.delete(found[0])
            self.said[id_].deleted = True

    @rule(days=st.integers(1, 6))
    def wait(self, days: int) -> None:
        """Let time pass."""
        self.now += days * DAY

    @rule()
    def purge(self) -> None:
        """Delete what has expired."""
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
        made = self.service.conversations.create({}, key, items)
        self.talks[made.id] = Talk([(items[0]["id"], word)])
        return made.id

    @rule(target=responses, talk=conversations, word=words, store=st.booleans())
    def respond(self, talk: str, word: str, store: bool) -> Any:
        """Create a response in a conversation."""
        known = self.talks[talk]
        made = self.ask(input=word, conversation=talk, store=store)
        if not store:
            return multiple()
        stored = self.service.conversations.find(talk)
        assert stored is not None
        new = self.service.conversations.items(stored)[len(known.items) :]
        known.items += [(item["id"], item["content"][0]["text"]) for item in new]
        assert [text for _, text in known.items[-2:]] == [word, *texts(made["output"])]
        self.said[made["id"]] = Said([t for _, t in known.items], self.now + 10 * DAY)
        return made["id"]

    @rule(talk=conversations, word=words)
    def add(self, talk: str, word: str) -> None:
        """Add an item to a conversation."""
        found = self.service.conversations.find(talk)
        if found is not None:
            key, items = self.items(word)
            self.service.conversations.add(found, key, items)
            self.talks[talk].items.append((items[0]["id"], word))

    @rule(talk=conversations, place=st.integers(0, 20))
    def remove(self, talk: str, place: int) -> None:
        """Take an item out of a conversation."""
        found, known = self.service.conversations.find(talk), self.talks[talk]
        if found is not None and known.items:
            id_, _ = known.items.pop(place % len(known.items))
            assert self.service.conversations.remove(found, id_)

    @rule(talk=consumes(conversations))
    def drop(self, talk: str) -> None:
        """Delete a conversation."""
        found = self.service.conversations.find(talk)
        assert found is not None
        self.service.conversations.delete(found)
        self.talks[talk].deleted = True

    def items(self, word: str) -> tuple[str, list[Any]]:
        """Write one message out."""
        key = new_key(self.service.nodes.next_number())
        return key, list(written_out([{"role": "user", "content": word}], key))

    @invariant()
    def every_context_is_what_was_said(self) -> None:
        """Live responses and conversations hold exactly what the model says."""
        for id_, said in self.said.items():
            found = self.service.responses.find(id_)
            assert (found is not None) == self.alive(id_)
            if found is not None:
                assert texts(self.service.nodes.context(found[0]).whole()) == said.texts
        for id_, talk in self.talks.items():
            stored = self.service.conversations.find(id_)
            assert (stored is None) == talk.deleted
            if stored is not None:
                kept = self.service.conversations.items(stored)
                assert [(item["id"], item["content"][0]["text"]) for item in kept] == talk.items

    @invariant()
    def nothing_is_kept_that_nobody_needs(self) -> None:
        """Without responses and conversations there are no nodes."""
        undeleted = any(not said.deleted for said in self.said.values())
        if not undeleted and all(talk.deleted or not talk.items for talk in self.talks.values()):
            assert self.service.nodes._run("SELECT count(*) FROM nodes").fetchone() == (0,)


TestServerState = ServerState.TestCase
TestServerState.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
