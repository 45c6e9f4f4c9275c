"""Models for tests: what they write comes when the test says so."""

import asyncio
from collections.abc import AsyncIterator

from kedge.server.models import Closed, Grown, Opened, Piece, PracticeModel, Prompt


def words_of(prompt: Prompt) -> str:
    """The last thing that was said to the model."""
    return str(prompt.ask.items[-1]["content"][0]["text"])


class Gated(PracticeModel):
    """Stops at a gate, after its first word, for a prompt that starts with "wait"."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self.ended: list[str] = []
        self._open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def let_go(self) -> None:
        """Open the gate, from the thread of the test."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._open.set)

    async def answer(self, prompt: Prompt) -> AsyncIterator[Piece]:
        """Write an answer in two pieces, with the gate between them."""
        self._loop = asyncio.get_running_loop()
        said = words_of(prompt)
        self.begun.append(said)
        yield Opened("text")
        yield Grown("answer ")
        try:
            if said.startswith("wait"):
                await self._open.wait()
        except asyncio.CancelledError:
            self.stopped.append(said)
            raise
        yield Grown(f"to {said}")
        yield Closed()
        self.ended.append(said)
