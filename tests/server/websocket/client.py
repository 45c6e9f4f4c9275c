"""A WebSocket client for tests: messages as dicts, and the bounded waits of all tests."""

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
    """One connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **message: Any) -> None:
        """Send one message as it is."""
        await self.connection.send(json.dumps(message))

    async def create(self, prompt: Any = "Hello", **body: Any) -> None:
        """Ask for a response, and wait for nothing."""
        await self.send(type="response.create", model="practice", input=prompt, **body)

    async def next_event(self) -> Event:
        """The next event, whichever lane it is from."""
        return json.loads(await asyncio.wait_for(self.connection.recv(), TIMEOUT))

    async def read_response(self, stream_id: str | None = None) -> list[Event]:
        """The events of a lane, up to the end of its response."""
        events: list[Event] = []
        while True:
            event = await self.next_event()
            if event.get("stream_id") == stream_id:
                events.append(event)
                if event["type"] in TERMINAL_EVENTS:
                    return events

    async def create_and_read(self, prompt: Any = "Hello", **body: Any) -> Event:
        """Ask for a response; return its last event."""
        await self.create(prompt, **body)
        return (await self.read_response(body.get("stream_id")))[-1]

    async def create_unstored(self, prompt: Any = "Hello", **body: Any) -> str:
        """Ask for a response that is not stored; return its id."""
        ended = await self.create_and_read(prompt, store=False, **body)
        assert ended["type"] == "response.completed", ended
        return ended["response"]["id"]

    async def wait_closed(self) -> int | None:
        """Wait until the server closes; say with which code."""
        await asyncio.wait_for(self.connection.wait_closed(), TIMEOUT)
        return self.connection.close_code


@asynccontextmanager
async def connect_client(
    server: TestServer, path: str = "/responses", **options: Any
) -> AsyncIterator[WebSocketClient]:
    """Open a connection to a server."""
    url = server.base_url.replace("http", "ws", 1) + path
    # No pings: a test whose client does not read must not lose its connection after a while.
    waits: Any = {"open_timeout": TIMEOUT, "close_timeout": TIMEOUT, "ping_interval": None}
    async with connect(url, compression=None, max_size=None, **waits, **options) as connection:
        yield WebSocketClient(connection)


def response_text(event: Event) -> str:
    """What the model said."""
    return event["response"]["output"][-1]["content"][0]["text"]
