"""Concurrent clients: a slow reader delays no other client, and a disconnect stops the model."""

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

STREAM_COUNT = 20
LENGTH, CHUNK = 1_200, "word " * 1_000
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
    if connection:
        reader, writer = await asyncio.open_connection(sock=connection)
    else:
        reader, writer = await asyncio.open_connection(*server.address)
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


async def test_slow_reader_delays_no_other_stream() -> None:
    """All other streams finish before a slow reader continues, and it then gets its complete answer."""
    model = LongAnswerModel()
    with serve(model=model) as server:
        slow, writer = await open_stream(server, "long", await connect_slow_reader(server))
        assert (await slow.readline()).startswith(b"HTTP/1.1 200")
        answers = await asyncio.gather(
            *(read_stream(server, f"quick {n}") for n in range(STREAM_COUNT - 1))
        )
        assert all(b"event: response.completed" in answer for answer in answers)
        assert len(model.finished) == STREAM_COUNT - 1
        await wait_until_async(lambda: server.running == 1)
        size, tail = 0, b""
        while chunk := await asyncio.wait_for(slow.read(1 << 20), TIMEOUT):
            size, tail = size + len(chunk), (tail + chunk)[-100:]
        assert b"data: [DONE]" in tail
        assert size > LENGTH * len(CHUNK)
        assert model.finished[-1] == "long"
        writer.close()


async def test_slow_reader_delays_no_other_websocket() -> None:
    """All other WebSockets finish while one is not read."""
    model = LongAnswerModel()
    with serve(model=model) as server:
        async with AsyncExitStack() as stack:
            connection = await connect_slow_reader(server)
            slow = await stack.enter_async_context(
                connect_client(server, max_queue=1, sock=connection)
            )
            await slow.create("long")
            assert (await slow.next_event())["type"] == "response.created"
            wires = [
                await stack.enter_async_context(connect_client(server))
                for _ in range(STREAM_COUNT - 1)
            ]
            ended = await asyncio.gather(*(wire.create_and_read("quick") for wire in wires))
            assert all(event["type"] == "response.completed" for event in ended)
            assert model.finished == ["quick"] * (STREAM_COUNT - 1)
            assert len(response_text((await slow.read_response())[-1])) == LENGTH * len(CHUNK)


async def test_disconnected_clients_stop_the_model() -> None:
    """The model is cancelled when its HTTP or WebSocket client disconnects."""
    model = GatedModel()
    with serve(model=model) as server:
        streams = [await open_stream(server, f"wait {n}") for n in range(STREAM_COUNT)]
        async with AsyncExitStack() as stack:
            for n in range(STREAM_COUNT, STREAM_COUNT + 5):
                wire = await stack.enter_async_context(connect_client(server))
                await wire.create(f"wait {n}")
            await wait_until_async(lambda: len(model.started) == STREAM_COUNT + 5)
            for _, writer in streams:
                writer.close()
        await wait_until_async(lambda: len(model.cancelled) == STREAM_COUNT + 5)
        await wait_until_async(lambda: server.running == 0)
        assert not model.finished
