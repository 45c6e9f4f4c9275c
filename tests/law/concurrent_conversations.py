"""Many concurrent conversations on one server, with one faulty request in five.

The conversations share two engines, one over HTTP and one over WebSockets, and one store. The context of
every finished answer is checked: the model must have received exactly the Turn, and nothing of another
conversation. At the end, every question is stored once, in its own conversation.

``python tests/law/concurrent_conversations.py 200`` runs the campaign.
"""

import logging
import re
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from kedge import Conversation, connect
from kedge.engines import Engine
from kedge.errors import EngineError
from kedge.events.run import AnswerFinished
from kedge.store import Store, open_store
from kedge.testing import TestServer, serve
from kedge.turns import UserBlock
from normalization import expected_context, normalize_blocks, normalize_items

FAULTY_EVERY = 5
FAULTS = (
    "cut_after_events=0",
    "status=500",
    "cut_in_event=2",
    "omit_response_id",
    "status=429,retry_after=0",
    "fail_after_events=2",
    "omit_output_index",
    "cut_after_events=3",
    "duplicate_events",
    "status=503",
    "reorder_events,only=response.output_text.delta",
    "stream_content_type=none",
)
"""Failures and irregular streams. Each is set once, for the next request that supports it.

A server that forgets silently is not among them: one such answer ends chaining for all conversations.
"""
FORGET_EVERY = 400
"""After this many faults the server loses all responses, which affects all conversations."""
MAX_ATTEMPTS = 100
"""The maximum number of attempts for a question; with one faulty request in five, only a bug exceeds it."""


@dataclass
class ConcurrentRun:
    """A number of concurrent conversations.

    Attributes:
        folder: The folder of the store.
        count: The number of conversations.
        messages: The questions in each.
        requests: The requests so far, of which one in five is faulty.
        checked: The answers whose context was compared with the Turn.
        chained: The number of checked answers that continued a stored response.
        failed: The requests that raised an error.
        faulty: The faults that were set.
    """

    folder: Path
    count: int
    messages: int
    requests: int = 0
    checked: int = 0
    chained: int = 0
    failed: int = 0
    faulty: int = 0
    server: TestServer = field(init=False)

    async def run(self) -> None:
        """Run the conversations, then check the store."""
        url = f"sqlite:///{self.folder}/concurrent.db"
        async with AsyncExitStack() as stack:
            self.server = stack.enter_context(serve())
            store = await stack.enter_async_context(await open_store(url))
            engines = [self._connect(stack, transport) for transport in ("http", "websocket")]
            async with anyio.create_task_group() as group:
                for number in range(self.count):
                    group.start_soon(self._converse, store, engines[number % 2], number)
            await self._check_store(store)

    def _connect(self, stack: AsyncExitStack, transport: Any) -> Engine:
        engine = connect(
            f"responses:{self.server.base_url}#practice", transport=transport, max_retries=0
        )
        stack.push_async_callback(engine.aclose)
        return engine

    async def _converse(self, store: Store, engine: Engine, number: int) -> None:
        conversation = await Conversation.create(
            engine, store=store, title=f"Conversation {number}"
        )
        for text in self._list_questions(number):
            await self._ask(conversation, text)

    def _list_questions(self, number: int) -> list[str]:
        return [f"Line {index} of conversation {number:04}" for index in range(self.messages)]

    async def _ask(self, conversation: Conversation, text: str) -> None:
        """Send a question until it is answered."""
        stream = conversation.stream(text)
        for _ in range(MAX_ATTEMPTS):
            self._set_fault()
            try:
                async with stream:
                    async for event in stream:
                        if isinstance(event, AnswerFinished):
                            self._check_context(event)
            except EngineError:
                self.failed += 1
                stream = conversation.stream_resume()
            else:
                return
        raise AssertionError(f"no answer after {MAX_ATTEMPTS} attempts: {text}")

    def _set_fault(self) -> None:
        """Set a fault for every fifth request of all conversations."""
        self.requests += 1
        if self.requests % FAULTY_EVERY == 0:
            forgets = self.faulty % FORGET_EVERY == FORGET_EVERY - 1
            spec = "forget_all" if forgets else FAULTS[self.faulty % len(FAULTS)]
            self.server.faults.set(spec, times=1)
            self.faulty += 1

    def _check_context(self, event: AnswerFinished) -> None:
        response_id = event.outcome.response_id
        if not response_id:
            return  # a response without an id
        request = next(
            each for each in reversed(self.server.requests) if each.response_id == response_id
        )
        assert normalize_items(request.context) == expected_context(event.turn)
        self.checked += 1
        self.chained += bool(request.body.get("previous_response_id"))

    async def _check_store(self, store: Store) -> None:
        """Check that each conversation has its own questions, in order, and its own answers."""
        assert await store.verify() == []
        rows = {row.title: row for row in await store.conversations(limit=self.count + 1)}
        assert len(rows) == self.count
        for number in range(self.count):
            turn = (await store.load(rows[f"Conversation {number}"])).turn()
            questions = [block.text for block in turn.blocks if isinstance(block, UserBlock)]
            assert questions == self._list_questions(number)
            numbers = re.findall(r"of conversation (\d{4})", str(normalize_blocks(turn.blocks)))
            assert set(numbers) == {f"{number:04}"}


def main(count: int, messages: int = 10) -> int:
    """Run this many conversations and print the results; a wrong answer raises."""
    logging.getLogger().addHandler(logging.NullHandler())  # irregular streams are intended here
    with tempfile.TemporaryDirectory() as folder:
        run = ConcurrentRun(Path(folder), count, messages)
        anyio.run(run.run)
    print(f"conversations       {count:>8,}")
    print(f"requests            {run.requests:>8,}   {run.faulty:,} with a fault")
    print(f"answers checked     {run.checked:>8,}   {run.chained:,} chained")
    print(f"requests that failed{run.failed:>8,}   all of them answered later")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
