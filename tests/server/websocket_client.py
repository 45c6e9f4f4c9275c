"""A WebSocket client for tests: messages are dicts, and every wait is bounded."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from kedge.testing import TestServer
from server.waiting import TIMEOUT

Event = dict[str, Any]
TERMINAL_EVENTS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "error"}
)


class WebSocketClient:
    """One WebSocket connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **message: Any) -> None:
        """Send one message unchanged."""
        await self.connection.send(json.dumps(message))

    async def create(self, prompt: Any = "Hello", **body: Any) -> None:
        """Request a response without waiting for it."""
        await self.send(type="response.create", model="practice", input=prompt, **body)

    async def next_event(self) -> Event:
        """Return the next event of any lane."""
        return json.loads(await asyncio.wait_for(self.connection.recv(), TIMEOUT))

    async def read_response(self, stream_id: str | None = None) -> list[Event]:
        """Return the events of a lane, up to the end of its response."""
        events: list[Event] = []
        while True:
            event = await self.next_event()
            if event.get("stream_id") == stream_id:
                events.append(event)
                if event["type"] in TERMINAL_EVENTS:
                    return events

    async def create_and_read(self, prompt: Any = "Hello", **body: Any) -> Event:
        """Request a response and return its last event."""
        await self.create(prompt, **body)
        return (await self.read_response(body.get("stream_id")))[-1]

    async def create_unstored(self, prompt: Any = "Hello", **body: Any) -> str:
        """Request a response that is not stored and return its id."""
        ended = await self.create_and_read(prompt, store=False, **body)
        assert ended["type"] == "response.completed", ended
        return ended["response"]["id"]

    async def wait_closed(self) -> int | None:
        """Wait until the server closes the connection and return the close code."""
        await asyncio.wait_for(self.connection.wait_closed(), TIMEOUT)
        return self.connection.close_code


@asynccontextmanager
async def connect_client(
    server: TestServer, path: str = "/responses", **options: Any
) -> AsyncIterator[WebSocketClient]:
    """Open a connection to a server and yield its client."""
    url = server.base_url.replace("http", "ws", 1) + path
    # No pings: a client that does not read must not lose its connection.
    waits: Any = {"open_timeout": TIMEOUT, "close_timeout": TIMEOUT, "ping_interval": None}
    async with connect(url, compression=None, max_size=None, **waits, **options) as connection:
        yield WebSocketClient(connection)


def response_text(event: Event) -> str:
    """Return the text of the last output item."""
    return event["response"]["output"][-1]["content"][0]["text"]
