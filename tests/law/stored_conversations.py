"""The common parts of fuzzers that run random scripts in stored conversations."""

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from kedge import Conversation, tool
from kedge.errors import HeadConflict, NotInStore
from kedge.store import Store, open_store
from kedge.testing import TestServer
from kedge.turns import UserBlock
from law.networks import Network, SocketNetwork

PROMPTS = ("Line {n}", "Please call alpha.", "Please call alpha and call beta.", "Think about {n}.")
MAX_MESSAGES = 9
"""The number of messages above which a conversation with a compactor is compacted."""


@tool
async def alpha() -> str:
    """A tool that works."""
    return "result of alpha"


@tool
async def beta() -> str:
    """A tool that fails."""
    raise RuntimeError("beta is out of order")


@dataclass
class StoredConversations:
    """A store in a file, and the conversations in it, of which the last is the current one."""

    rng: random.Random
    path: str
    keep_bodies: bool = False
    conversations: list[Conversation] = field(default_factory=list[Conversation])
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    prompt_count: int = 0
    ignored: tuple[type[Exception], ...] = (NotInStore,)
    """Errors of actions: there may be nothing to undo, to regenerate or to resume."""
    network: Network = field(default_factory=SocketNetwork)
    store: Store = field(init=False)

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    async def _open_store(self, server: TestServer) -> Store:
        opened = await open_store(
            f"sqlite:///{self.path}", keep_bodies=self.keep_bodies, clock=server.clock
        )
        return await self.stack.enter_async_context(opened)

    @property
    def conversation(self) -> Conversation:
        """Return the current conversation."""
        return self.conversations[-1]

    async def run(self, actions: Sequence[str]) -> None:
        """Run these actions one after the other."""
        for name in actions:
            try:
                await getattr(self, f"do_{name}")()
            except HeadConflict:
                await self.conversation.refresh()
            except self.ignored:
                pass
            await self._finish_action()

    async def _finish_action(self) -> None:
        """Clean up after an action, and check its results."""

    def _next_prompt(self, prompts: Sequence[str] = PROMPTS) -> str:
        self.prompt_count += 1
        return self.rng.choice(prompts).format(n=self.prompt_count)

    async def do_edit(self) -> None:
        """Replace a user message."""
        users = [block for block in self.conversation.turn.blocks if isinstance(block, UserBlock)]
        if users:
            await self.conversation.edit(self.rng.choice(users).id, f"Edited {self.rng.random()}")

    async def do_undo(self) -> None:
        """Undo the last exchange."""
        await self.conversation.undo()

    async def do_switch(self) -> None:
        """Switch to another conversation."""
        self.rng.shuffle(self.conversations)


def list_actions(fuzzer: type[StoredConversations]) -> tuple[str, ...]:
    """Return the names of the actions of a fuzzer."""
    return tuple(name.removeprefix("do_") for name in dir(fuzzer) if name.startswith("do_"))
