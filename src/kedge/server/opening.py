"""The opening of a stream, held back until its model has begun.

Once a stream is open its status is 200, whatever happens then. A model behind the server may refuse, be
busy or be away, and its client should be told so with a proper status. So the opening of its stream
waits for the first words, but not for long: a model may also just be slow.
"""

import asyncio

from starlette.types import Message, Send


class Opening:
    """Stands for ``send`` and holds everything back until it is released, or for ``grace``."""

    def __init__(self, send: Send, grace: float) -> None:
        self._send = send
        self._held: list[Message] = []
        self._sending = asyncio.Lock()
        self.released = not grace
        self._timer: asyncio.Task[None] | None = None
        if grace:
            self._timer = asyncio.create_task(self._release_after(grace))

    async def __call__(self, message: Message) -> None:
        """Send a message, now or when the stream is opened."""
        if self.released:
            async with self._sending:
                await self._send(message)
        else:
            self._held.append(message)

    async def release(self) -> None:
        """Open the stream: send what was held back."""
        async with self._sending:
            self.released = True
            held, self._held = self._held, []
            for message in held:
                await self._send(message)

    def close(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()

    async def _release_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.release()
