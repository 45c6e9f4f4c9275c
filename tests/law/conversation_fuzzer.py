"""Runs stored conversations with forks, edits, several writers, and a server that loses context.

Like the engine fuzzer, it does not use digests or plans. The context of each finished answer is checked:
the server's model must have received the Turn. At any time, the store must contain the same conversation
as the object in memory.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from kedge import Conversation, connect
from kedge.compaction import MessageLimitCompactor
from kedge.errors import EngineError, NotInStore
from kedge.events import TextDelta
from kedge.events.run import AnswerFinished
from kedge.planning import get_state
from kedge.store import Store
from kedge.testing import TestServer
from kedge.turns import assistant, system, user
from law.record_views import is_create_request
from law.stored_conversations import MAX_MESSAGES, StoredConversations, alpha, beta, list_actions
from normalization import expected_context, normalize_blocks, normalize_items


@dataclass
class ConversationFuzzer(StoredConversations):
    """A server, a store, and the conversations in it."""

    ignored: tuple[type[Exception], ...] = (NotInStore, EngineError)
    server: TestServer = field(init=False)
    checked_count: int = 0

    async def __aenter__(self) -> Self:
        self.server = await self.stack.enter_async_context(self.network.open_server())
        self.store = await self._open_store(self.server)
        settings = {"store": self.store, **self._choose_settings()}
        self.conversations.append(await Conversation.create(self._build_engine(), **settings))
        return self

    def _build_engine(self) -> Any:
        engine = connect(
            f"responses:{self.server.base_url}#practice",
            scope="here",
            max_retries=0,
            clock=self.server.clock,
        )
        self.stack.push_async_callback(engine.aclose)
        return engine

    def _choose_settings(self) -> dict[str, Any]:
        compactor = MessageLimitCompactor(MAX_MESSAGES) if self.rng.random() < 0.3 else None
        return {"tools": [alpha, beta], "compactor": compactor}

    async def _open(self, store: Store, **settings: Any) -> Conversation:
        engine = self._build_engine()
        return await Conversation.open(engine, store=store, id=self.conversation.id, **settings)

    async def _finish_action(self) -> None:
        self.server.faults.clear()
        await self._check_store()

    async def _run_stream(self, stream: Any) -> None:
        """Consume a stream, and check the context of each answer."""
        async with stream:
            async for event in stream:
                if isinstance(event, AnswerFinished):
                    self._check_context(event)

    def _check_context(self, event: AnswerFinished) -> None:
        exchange = [each for each in self.server.requests if is_create_request(each)][-1]
        assert normalize_items(exchange.context) == expected_context(event.turn)
        self.checked_count += 1

    async def _check_store(self) -> None:
        """Check that the conversation in memory equals the stored one at the same node."""
        loaded = await self.store.load(self.conversation.row, self.conversation.head)
        stored = loaded.turn(self.conversation.id)
        assert normalize_blocks(stored.blocks) == normalize_blocks(self.conversation.turn.blocks)
        assert [b.id for b in stored.blocks] == [b.id for b in self.conversation.turn.blocks]
        mine = {r.response_id: r for r in get_state(self.conversation.turn).anchors}
        theirs = {r.response_id: r.digest for r in get_state(stored).anchors}
        assert all(mine[name].digest == digest for name, digest in theirs.items() if name in mine)

    async def do_send(self) -> None:
        """Send a message, streamed or not."""
        streaming = self.rng.random() < 0.5
        await self._run_stream(self.conversation.stream(self._next_prompt(), streaming=streaming))

    async def do_send_with_key(self) -> None:
        """Send a message twice with one key: the second time no request is sent."""
        self.prompt_count += 1
        key, text = f"key {self.prompt_count}", f"Line {self.prompt_count}"
        await self._run_stream(self.conversation.stream(text, key=key))
        before = len(self.server.requests)
        repeated = await self.conversation.send(text, key=key)
        assert repeated.stored
        assert len(self.server.requests) == before

    async def do_append(self) -> None:
        """Append a block without a request."""
        block = self.rng.choice((user, assistant, system))(f"Noted {self.prompt_count}")
        await self.conversation.append(block)

    async def do_regenerate(self) -> None:
        """Regenerate the last answer."""
        await self.conversation.regenerate()

    async def do_fork(self) -> None:
        """Fork from the head, a node or a block."""
        nodes = await self.store.tree(self.conversation.row)
        blocks = [block.id for block in self.conversation.turn.blocks]
        places = [None, self.rng.choice(nodes).id, *self.rng.sample(blocks, bool(blocks))]
        at = self.rng.choice(places)
        forked = await self.conversation.fork(at)
        if isinstance(at, str):
            assert forked.turn.blocks[-1].id == at
        self.conversations.append(forked)

    async def do_reopen(self) -> None:
        """Open the conversation with another store and engine, as another process would."""
        opened = await self._open_store(self.server)
        self.conversations[-1] = await self._open(opened, **self._choose_settings())

    async def do_concurrent_send(self) -> None:
        """Send a message by another object of the same conversation, which may cause a conflict."""
        other = await self._open(self.store)
        await self._run_stream(other.stream(self._next_prompt()))
        if self.rng.random() < 0.5:
            await self.conversation.refresh()

    async def do_disconnect(self) -> None:
        """Stop reading at the first text."""
        async with self.conversation.stream("Write 60 words.") as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break

    async def do_resume(self) -> None:
        """Resume a pending question."""
        await self.conversation.resume()

    async def do_cut_stream(self) -> None:
        """Send a message whose stream is interrupted by the server."""
        self.server.faults.set(f"cut_after_events={self.rng.randrange(8)}", times=1)
        await self.do_send()

    async def do_server_error(self) -> None:
        """Send a message to a failing server."""
        self.server.faults.set("status=500", times=1)
        await self.do_send()

    async def do_server_forget(self) -> None:
        """Delete all responses of the server."""
        self.server.forget()

    async def do_expire(self) -> None:
        """Advance the clock by a month, and delete expired responses."""
        self.server.clock.advance(days=31)
        self.server.purge()

    async def do_export_import(self) -> None:
        """Export the conversation and import it with another id."""
        (row,) = await self.store.import_(await self.conversation.export())
        reopened = await Conversation.open(
            self._build_engine(), store=self.store, id=row.id, **self._choose_settings()
        )
        head = await Conversation.open(
            self.conversation.engine, store=self.store, id=self.conversation.id
        )
        assert normalize_blocks(reopened.turn.blocks) == normalize_blocks(head.turn.blocks)
        self.conversations.append(reopened)


ACTIONS = list_actions(ConversationFuzzer)
WEIGHTS = [10 if name == "send" else 1 for name in ACTIONS]
