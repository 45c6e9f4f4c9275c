"""Concurrent clients: a slow reader delays no other client."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent, Prompt
from kedge.testing import TestServer, serve
from server.gated_model import GatedModel, last_user_text
from server.waiting import TIMEOUT, wait_until_async
from server.websocket_client import connect_client, response_text

COUNT = 10
LENGTH = 1_200
CHUNK = "word " * 1_000
"""An answer of 6 MB: larger than what the server's system sends ahead, and the slow reader's receives."""
RECEIVE_BYTES = 65_536
"""The receive buffer of the slow reader; systems enlarge others, some to 32 MB."""


class LongAnswerModel(GatedModel):
    """A model with a very long answer to "long", and short answers to other prompts."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield the answer without waiting."""
        text = last_user_text(prompt)
        self.started.append(text)
        yield ItemOpened("text")
        for _ in range(LENGTH if text == "long" else 20):
            yield ItemDelta(CHUNK if text == "long" else "word ")
        yield ItemClosed()
        self.finished.append(text)


async def connect_slow_reader(server: TestServer) -> socket.socket:
    """Return a connection with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, server.address)
    return connection


async def open_stream(
    server: TestServer, prompt: str, connection: socket.socket | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Request a stream, over a new connection unless one is given."""
    if connection is None:
        reader, writer = await asyncio.open_connection(*server.address)
    else:
        reader, writer = await asyncio.open_connection(sock=connection)
    body = json.dumps({"model": "m", "input": prompt, "stream": True}).encode()
    writer.write(
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()
    return reader, writer


async def read_stream(server: TestServer, prompt: str) -> bytes:
    """Request a stream and return all of its bytes."""
    reader, writer = await open_stream(server, prompt)
    try:
        return await asyncio.wait_for(reader.read(-1), TIMEOUT)
    finally:
        writer.close()


async def test_slow_readers_delay_no_others() -> None:
    """All others finish before slow readers of a stream and of a WebSocket continue, which then get their answers."""
    model = LongAnswerModel()
    with serve(model=model) as server:
        async with AsyncExitStack() as stack:
            connection = await connect_slow_reader(server)
            socket_client = connect_client(server, max_queue=1, sock=connection)
            slow_socket = await stack.enter_async_context(socket_client)
            await slow_socket.create("long")
            assert (await slow_socket.next_event())["type"] == "response.created"
            slow, writer = await open_stream(server, "long", await connect_slow_reader(server))
            assert (await slow.readline()).startswith(b"HTTP/1.1 200")
            wires = [await stack.enter_async_context(connect_client(server)) for _ in range(COUNT)]
            events = await asyncio.gather(*(wire.create_and_read("quick") for wire in wires))
            assert [event["type"] for event in events] == ["response.completed"] * COUNT
            answers = await asyncio.gather(*(read_stream(server, "quick") for _ in range(COUNT)))
            assert all(b"event: response.completed" in answer for answer in answers)
            assert model.finished == ["quick"] * COUNT * 2
            await wait_until_async(lambda: server.running == 2)
            answer = await asyncio.wait_for(slow.read(-1), TIMEOUT)
            assert b"data: [DONE]" in answer[-100:]
            assert len(answer) > LENGTH * len(CHUNK)
            writer.close()
            (*_, last) = await slow_socket.read_response()
            assert len(response_text(last)) == LENGTH * len(CHUNK)
