"""Many at once: one who reads slowly holds up nobody else, and who leaves stops the model's work."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from kedge.server.models import ItemClosed, ItemDelta, ItemOpened, OutputEvent, Prompt
from kedge.testing import TestServer, serve
from server.gated_model import GatedModel, last_user_text
from server.waiting import TIMEOUT, wait_until_async
from server.websocket.client import connect_client, response_text

STREAM_COUNT = 50
LENGTH, CHUNK = 1_200, "word " * 1_000
"""An answer that the buffers on the way cannot hold: 6 MB."""


class LongAnswerModel(GatedModel):
    """Writes a very long answer to "long", and short ones to anything else."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Write the answer, never waiting."""
        said = last_user_text(prompt)
        self.started.append(said)
        yield ItemOpened("text")
        for _ in range(LENGTH if said == "long" else 20):
            yield ItemDelta(CHUNK if said == "long" else "word ")
        yield ItemClosed()
        self.finished.append(said)


async def open_stream(
    server: TestServer, prompt: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream over a connection of its own."""
    reader, writer = await asyncio.open_connection(*server.address)
    body = json.dumps({"model": "m", "input": prompt, "stream": True}).encode()
    writer.write(
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()
    return reader, writer


async def read_stream(server: TestServer, prompt: str) -> bytes:
    """Ask, and read everything."""
    reader, writer = await open_stream(server, prompt)
    try:
        return await asyncio.wait_for(reader.read(-1), TIMEOUT)
    finally:
        writer.close()


async def test_a_slow_reader_among_many_streams_holds_nobody_up() -> None:
    """All others come to their end while it has hardly begun to read; then it gets all of its own."""
    model = LongAnswerModel()
    with serve(model=model) as server:
        slow, writer = await open_stream(server, "long")
        assert (await slow.readline()).startswith(b"HTTP/1.1 200")
        answers = await asyncio.gather(
            *(read_stream(server, f"quick {n}") for n in range(STREAM_COUNT - 1))
        )
        assert all(b"event: response.completed" in answer for answer in answers)
        assert len(model.finished) == STREAM_COUNT - 1
        assert server.running == 1
        size, tail = 0, b""
        while chunk := await asyncio.wait_for(slow.read(1 << 20), TIMEOUT):
            size, tail = size + len(chunk), (tail + chunk)[-100:]
        assert b"data: [DONE]" in tail
        assert size > LENGTH * len(CHUNK)
        assert model.finished[-1] == "long"
        writer.close()


async def test_a_slow_reader_holds_up_no_other_socket() -> None:
    """Nor does a WebSocket that is not read."""
    model = LongAnswerModel()
    with serve(model=model) as server:
        async with AsyncExitStack() as stack:
            slow = await stack.enter_async_context(connect_client(server, max_queue=1))
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


async def test_clients_that_leave_stop_the_models_work() -> None:
    """Streams, whole answers and sockets alike: nothing goes on for nobody."""
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
