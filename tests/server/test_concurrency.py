"""Many at once: one who reads slowly holds up nobody else, and who leaves stops the model's work."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from kedge.server.models import Closed, Grown, Opened, Piece, Prompt
from kedge.testing import TestServer, serve
from server.models import Gated, words_of
from server.sockets.wires import PATIENCE, until, wired, words

MANY = 50
LENGTH, CHUNK = 1_200, "word " * 1_000
"""An answer that the buffers on the way cannot hold: 6 MB."""


class Endless(Gated):
    """Writes a very long answer to "long", and short ones to anything else."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[Piece]:
        """Write the answer, never waiting."""
        said = words_of(prompt)
        self.begun.append(said)
        yield Opened("text")
        for _ in range(LENGTH if said == "long" else 20):
            yield Grown(CHUNK if said == "long" else "word ")
        yield Closed()
        self.ended.append(said)


async def opened(
    server: TestServer, said: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream over a connection of its own."""
    reader, writer = await asyncio.open_connection(*server.address)
    body = json.dumps({"model": "m", "input": said, "stream": True}).encode()
    writer.write(
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()
    return reader, writer


async def read(server: TestServer, said: str) -> bytes:
    """Ask, and read everything."""
    reader, writer = await opened(server, said)
    try:
        return await asyncio.wait_for(reader.read(-1), PATIENCE)
    finally:
        writer.close()


async def test_a_slow_reader_among_many_streams_holds_nobody_up() -> None:
    """All others come to their end while it has hardly begun to read; then it gets all of its own."""
    model = Endless()
    with serve(model=model) as server:
        slow, writer = await opened(server, "long")
        assert (await slow.readline()).startswith(b"HTTP/1.1 200")
        answers = await asyncio.gather(*(read(server, f"quick {n}") for n in range(MANY - 1)))
        assert all(b"event: response.completed" in answer for answer in answers)
        assert len(model.ended) == MANY - 1
        assert server.running == 1
        size, tail = 0, b""
        while chunk := await asyncio.wait_for(slow.read(1 << 20), PATIENCE):
            size, tail = size + len(chunk), (tail + chunk)[-100:]
        assert b"data: [DONE]" in tail
        assert size > LENGTH * len(CHUNK)
        assert model.ended[-1] == "long"
        writer.close()


async def test_a_slow_reader_holds_up_no_other_socket() -> None:
    """Nor does a WebSocket that is not read."""
    model = Endless()
    with serve(model=model) as server:
        async with AsyncExitStack() as stack:
            slow = await stack.enter_async_context(wired(server, max_queue=1))
            await slow.create("long")
            assert (await slow.event())["type"] == "response.created"
            wires = [await stack.enter_async_context(wired(server)) for _ in range(MANY - 1)]
            ended = await asyncio.gather(*(wire.ask("quick") for wire in wires))
            assert all(event["type"] == "response.completed" for event in ended)
            assert model.ended == ["quick"] * (MANY - 1)
            assert len(words((await slow.rest())[-1])) == LENGTH * len(CHUNK)


async def test_clients_that_leave_stop_the_models_work() -> None:
    """Streams, whole answers and sockets alike: nothing goes on for nobody."""
    model = Gated()
    with serve(model=model) as server:
        streams = [await opened(server, f"wait {n}") for n in range(MANY)]
        async with AsyncExitStack() as stack:
            for n in range(MANY, MANY + 5):
                wire = await stack.enter_async_context(wired(server))
                await wire.create(f"wait {n}")
            await until(lambda: len(model.begun) == MANY + 5)
            for _, writer in streams:
                writer.close()
        await until(lambda: len(model.stopped) == MANY + 5)
        await until(lambda: server.running == 0)
        assert not model.ended
