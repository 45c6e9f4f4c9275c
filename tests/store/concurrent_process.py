"""Processes that create, append, send, fork and delete in one store, one for each seed.

    python concurrent_process.py URL OPERATIONS SEED...

Each process also uses the conversations of the others, and rows that were deleted since it read them.
"""

import asyncio
import multiprocessing
import random
import sys
from contextlib import suppress
from importlib import import_module

from kedge import Conversation, assistant, user
from kedge.errors import HeadConflict, NotInStore
from kedge.store import ConversationRow, Incident, Node, Store, Telemetry, open_store
from kedge.usage.tokens import get_encoding

SHARED = [user(f"shared text {number}", id=f"blk_shared_{number}") for number in range(5)]
TELEMETRY = Telemetry((Incident("healed", "gone", "scope", 5.0),))
MAX_HANDLES = 12


class Process:
    """A process with the conversation rows and nodes it has read."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.seed = seed
        self.handles: list[tuple[ConversationRow, Node]] = []

    async def run(self, operations: int) -> None:
        """Run random operations, and search after every twenty."""
        choices = [self.create, *[self.append] * 2, self.send, self.open]
        choices += [self.fork, self.delete, self.claim]
        for number in range(operations):
            with suppress(NotInStore, HeadConflict):
                await self.rng.choice(choices)()
            if number % 20 == 19:
                await self.store.search("text")

    async def create(self) -> None:
        row = await self.store.create("Created", tags=["x"], blocks=[self.rng.choice(SHARED)])
        await self._add_handle(row)

    async def open(self) -> None:
        rows = await self.store.conversations(limit=10)
        if rows:
            await self._add_handle(self.rng.choice(rows))

    async def append(self) -> None:
        row, node = await self._pick()
        text = f"text of {self.seed}: {self.rng.random()}"
        retained = self.rng.choice([node.length, max(0, node.length - 1), 0])
        shared = [self.rng.choice(SHARED)] if not retained else []
        blocks = [user(text), *shared, assistant("answer")]
        head = self.rng.choice([None, node.id])
        appended = await self.store.append(
            row, node, blocks, kept=retained, head=head, telemetry=TELEMETRY
        )
        self.handles.append((row, appended))

    async def send(self) -> None:
        row, _ = await self._pick()
        async with await Conversation.open("practice", store=self.store, id=row.id) as conversation:
            await conversation.send("text to send", key=f"s{self.rng.randint(0, 3)}")

    async def fork(self) -> None:
        row, node = await self._pick()
        await self._add_handle(await self.store.fork(row, node.id))

    async def delete(self) -> None:
        row, _ = await self._pick()
        await self.store.delete(row)

    async def claim(self) -> None:
        row, node = await self._pick()
        key = f"k{self.rng.randint(0, 3)}"
        await self.store.claim(row, key, request_hash=b"x", owner=str(self.seed), lease=0.01)
        await self.store.settle(row, key, node.id)

    async def _pick(self) -> tuple[ConversationRow, Node]:
        del self.handles[:-MAX_HANDLES]
        while not self.handles:
            await self.create()
        return self.rng.choice(self.handles)

    async def _add_handle(self, row: ConversationRow) -> None:
        self.handles.append((row, (await self.store.load(row)).node))


async def work(url: str, operations: int, seed: int) -> None:
    """Run the operations of one seed on the store at this address."""
    async with open_store(url, wait_seconds=60.0) as store:
        await Process(store, seed).run(operations)


def run(url: str, operations: str, seed: str) -> None:
    """Run the operations of one seed in a separate process."""
    asyncio.run(work(url, int(operations), int(seed)))


if __name__ == "__main__":
    url, operations, *seeds = sys.argv[1:]
    # Before the fork, because imports and the vocabulary take longer than the operations.
    for name in ("aiohttp", "kedge.server.app", "uvicorn.lifespan.on", "websockets.server"):
        import_module(name)
    get_encoding()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(url, operations, seed)) for seed in seeds]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
