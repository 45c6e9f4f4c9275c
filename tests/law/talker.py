"""Plays durable conversations: every way through the tree, several hands, and a server that forgets.

Like the player it knows nothing of digests or plans. Each finished answer is judged where it was given:
what the server's model saw must be what the Turn said. And at any time the store must hold just the
conversation that its holder has.
"""

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from kedge import Conversation, connect
from kedge.compaction import MessageLimitCompactor
from kedge.errors import EngineError, HeadConflict, NotInStore
from kedge.events import TextDelta
from kedge.events.run import AnswerFinished
from kedge.planning import get_state
from kedge.server.access import Exchange
from kedge.store import Store, open_store
from kedge.testing import TestServer, serve
from kedge.turns import UserBlock, assistant, system, user
from wire import said, seen, sent

ASKS = ("Line {n}", "Please call alpha.", "Please call alpha and call beta.", "Think about {n}.")
KEPT = 9
"""Messages beyond which a conversation with a compactor is compacted."""


async def alpha() -> str:
    """A tool that works."""
    return "result of alpha"


async def beta() -> str:
    """A tool that does not."""
    raise RuntimeError("beta is out of order")


@dataclass
class Talker:
    """One world: a server, a store, and hands that hold conversations in it."""

    rng: random.Random
    path: str
    server: TestServer = field(init=False)
    store: Store = field(init=False)
    hands: list[Conversation] = field(default_factory=list[Conversation])
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    asked: int = 0
    judged: int = 0
    chained: int = 0
    conflicts: int = 0

    async def __aenter__(self) -> Self:
        self.server = self.stack.enter_context(serve())
        self.store = await self._open()
        talk = await Conversation.create(self.store, self._engine(), **self._settings())
        self.hands.append(talk)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    async def _open(self) -> Store:
        opened = await open_store(f"sqlite:///{self.path}", clock=self.server.clock)
        return await self.stack.enter_async_context(opened)

    def _engine(self) -> Any:
        engine = connect(
            f"responses:{self.server.base_url}#practice",
            scope="here",
            max_retries=0,
            clock=self.server.clock,
        )
        self.stack.push_async_callback(engine.aclose)
        return engine

    def _settings(self) -> dict[str, Any]:
        compactor = MessageLimitCompactor(KEPT) if self.rng.random() < 0.3 else None
        return {"tools": [alpha, beta], "compactor": compactor}

    @property
    def talk(self) -> Conversation:
        """The conversation that is being held."""
        return self.hands[-1]

    async def play(self, actions: list[str]) -> None:
        """Do these things one after the other, and look at the store after each."""
        for name in actions:
            try:
                await getattr(self, f"do_{name}")()
            except HeadConflict:
                self.conflicts += 1
                await self.talk.refresh()
            except (NotInStore, EngineError):
                pass  # nothing there to undo, to ask again or to resume; or a server that broke
            self.server.faults.clear()
            await self._compare()

    async def _watch(self, stream: Any) -> None:
        """Watch a turn, and judge each of its answers when it is given."""
        async with stream:
            async for event in stream:
                if isinstance(event, AnswerFinished):
                    self._judge(event)

    def _judge(self, event: AnswerFinished) -> None:
        exchange = [each for each in self.server.requests if _asks(each)][-1]
        assert seen(exchange.context) == sent(event.turn)
        self.judged += 1
        self.chained += bool(exchange.body.get("previous_response_id"))

    async def _compare(self) -> None:
        """What the hand holds is what a stranger finds at the same node."""
        loaded = await self.store.load(self.talk.row, self.talk.head)
        kept = loaded.turn(self.talk.id)
        assert said(kept.blocks) == said(self.talk.turn.blocks)
        assert [b.id for b in kept.blocks] == [b.id for b in self.talk.turn.blocks]
        mine = {r.response_id: r for r in get_state(self.talk.turn).anchors}
        theirs = {r.response_id: r.digest for r in get_state(kept).anchors}
        assert all(mine[name].digest == digest for name, digest in theirs.items() if name in mine)

    def _words(self) -> str:
        self.asked += 1
        return self.rng.choice(ASKS).format(n=self.asked)

    async def do_send(self) -> None:
        """Say something, streamed or not."""
        streaming = self.rng.random() < 0.5
        await self._watch(self.talk.stream(self._words(), streaming=streaming))

    async def do_send_with_key(self) -> None:
        """Say something twice under one key: the second time nothing is sent."""
        self.asked += 1
        key, words = f"key {self.asked}", f"Line {self.asked}"
        await self._watch(self.talk.stream(words, key=key))
        before = len(self.server.requests)
        again = await self.talk.send(words, key=key)
        assert again.stored
        assert len(self.server.requests) == before

    async def do_append(self) -> None:
        """Add something without asking."""
        made = self.rng.choice((user, assistant, system))(f"Noted {self.asked}")
        await self.talk.append(made)

    async def do_edit(self) -> None:
        """Put other words in the place of something a user said."""
        users = [block for block in self.talk.turn.blocks if isinstance(block, UserBlock)]
        if users:
            await self.talk.edit(self.rng.choice(users).id, f"Edited {self.rng.random()}")

    async def do_undo(self) -> None:
        """Go back."""
        await self.talk.undo()

    async def do_regenerate(self) -> None:
        """Ask again."""
        await self.talk.regenerate()

    async def do_fork(self) -> None:
        """Go on elsewhere: from here, from a node, from a block."""
        nodes = await self.store.tree(self.talk.row)
        blocks = [block.id for block in self.talk.turn.blocks]
        places: list[Any] = [
            None,
            self.rng.choice(nodes).id,
            *self.rng.sample(blocks, bool(blocks)),
        ]
        at = self.rng.choice(places)
        forked = await self.talk.fork(at)
        if isinstance(at, str):
            assert forked.turn.blocks[-1].id == at
        self.hands.append(forked)

    async def do_switch(self) -> None:
        """Hold another of the conversations."""
        self.rng.shuffle(self.hands)

    async def do_reopen(self) -> None:
        """As another process does: another store, another engine, the head as it is."""
        opened = await self._open()
        talk = await Conversation.open(opened, self.talk.id, self._engine(), **self._settings())
        self.hands[-1] = talk

    async def do_second_hand(self) -> None:
        """Somebody else says something to the same conversation; whoever comes later is told."""
        other = await Conversation.open(self.store, self.talk.id, self._engine())
        await self._watch(other.stream(self._words()))
        if self.rng.random() < 0.5:
            await self.talk.refresh()

    async def do_leave(self) -> None:
        """Stop listening at the first word."""
        async with self.talk.stream("Write 60 words.") as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break

    async def do_resume(self) -> None:
        """Go on with what was asked and never answered."""
        await self.talk.resume()

    async def do_cut(self) -> None:
        """The server breaks off."""
        self.server.faults.set(f"cut_after_events={self.rng.randrange(8)}", times=1)
        await self.do_send()

    async def do_refuse(self) -> None:
        """The server fails."""
        self.server.faults.set("status=500", times=1)
        await self.do_send()

    async def do_forget(self) -> None:
        """The server loses its memory."""
        self.server.forget()

    async def do_expire(self) -> None:
        """A month goes by for everybody."""
        self.server.clock.advance(days=31)
        self.server.purge()

    async def do_carry(self) -> None:
        """Export it and take it in again, under another id."""
        (row,) = await self.store.import_(await self.talk.export())
        found = await Conversation.open(self.store, row.id, self._engine(), **self._settings())
        head = await Conversation.open(self.store, self.talk.id, self.talk.engine)
        assert said(found.turn.blocks) == said(head.turn.blocks)
        self.hands.append(found)


def _asks(exchange: Exchange) -> bool:
    return exchange.path == "/v1/responses" and exchange.method == "POST"


ACTIONS = tuple(name.removeprefix("do_") for name in vars(Talker) if name.startswith("do_"))
WEIGHTS = [10 if name == "send" else 1 for name in ACTIONS]
