"""Models for tests that continue writing only when the test allows it."""

import asyncio
from collections.abc import AsyncIterator

from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ModelUsage,
    OutputEvent,
    PracticeModel,
    Prompt,
)


def last_user_text(prompt: Prompt) -> str:
    """Return the text of the last item of the prompt."""
    return str(prompt.ask.items[-1]["content"][0]["text"])


class GatedModel(PracticeModel):
    """A model that waits after its first delta, and a number of words, if the prompt starts with "wait"."""

    def __init__(self, words: int = 0) -> None:
        super().__init__()
        self.words = words
        self.started: list[str] = []
        self.waiting: list[str] = []
        self.cancelled: list[str] = []
        self.finished: list[str] = []
        self.reported: ModelUsage | None = None
        self._gate = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open_gate(self) -> None:
        """Open the gate from the thread of the test."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._gate.set)

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield an answer in two deltas, with the gate between them."""
        self._loop = asyncio.get_running_loop()
        text = last_user_text(prompt)
        self.started.append(text)
        if self.reported is not None:
            yield self.reported
        yield ItemOpened("text")
        yield ItemDelta("answer ")
        for _ in range(self.words):
            yield ItemDelta("word ")
        try:
            if text.startswith("wait"):
                self.waiting.append(text)
                await self._gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        yield ItemDelta(f"to {text}")
        yield ItemClosed()
        self.finished.append(text)
