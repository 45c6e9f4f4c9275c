"""Kedge: a ``Conversation`` on SQLite."""

from history import INSTRUCTIONS, Peer, add

from kedge import Conversation, connect, open_store, system


class KedgePeer(Peer):
    """Every step is saved; the planner decides what is sent."""

    modules = ("kedge", "kedge.conversation", "kedge.engines")
    packages = ("kedge-llm",)
    durable = True
    conversation: Conversation | None = None
    main: Conversation
    lengths: list[int]
    """The number of blocks before each turn."""

    async def open(self) -> None:
        self.store = await open_store(f"sqlite:///{self.folder}/kedge.sqlite3")
        self.engine = connect(f"responses:{self.base_url}#practice", api_key="key")
        if self.conversation is None:
            blocks = [system(INSTRUCTIONS)]
            self.conversation = await Conversation.create(
                self.engine, store=self.store, blocks=blocks, tools=[add]
            )
            self.lengths = []
        else:
            self.conversation = await Conversation.open(
                self.engine, store=self.store, id=self.conversation.id, tools=[add]
            )

    @property
    def current(self) -> Conversation:
        """The conversation of the current branch."""
        assert self.conversation is not None
        return self.conversation

    async def close(self) -> None:
        await self.current.aclose()
        await self.engine.aclose()
        await self.store.aclose()

    async def send(self, text: str) -> str:
        before = len(self.current.turn)
        reply = await self.current.send(text)
        self.lengths.append(before)
        return reply.text

    async def stream(self, text: str) -> None:
        before = len(self.current.turn)
        async with self.current.stream(text) as events:
            async for _ in events:
                pass
        self.lengths.append(before)

    async def edit(self, turn: int, text: str) -> None:
        await self.current.edit(self.current.turn[self.lengths[turn]].id, text)

    async def undo(self) -> None:
        await self.current.truncate(self.lengths.pop())

    async def fork(self, turn: int) -> None:
        self.main, self.main_lengths = self.current, list(self.lengths)
        at = self.current.turn[self.lengths[turn] - 1].id
        self.conversation = await self.current.fork(at=at)
        del self.lengths[turn:]

    async def switch(self) -> None:
        self.conversation, self.lengths = self.main, list(self.main_lengths)

    async def summarize(self, turns: int, text: str) -> None:
        end = self.lengths[turns] if turns < len(self.lengths) else len(self.current.turn)
        await self.current.remove(*(block.id for block in self.current.turn[1:end]))
        await self.current.insert(1, text)
        removed = end - 1
        self.lengths = [1] + [length - removed + 1 for length in self.lengths[turns:]]

    async def restart(self) -> None:
        await self.close()
        await self.open()


PEER = KedgePeer
