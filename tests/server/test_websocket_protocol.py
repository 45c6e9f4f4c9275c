"""Fragments, control frames and empty messages of a WebSocket, in any number."""

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
from websockets.exceptions import ConnectionClosed

from kedge._internal import responsive
from kedge.server import websocket_protocol
from kedge.testing import TestServer
from server.conftest import open_client
from server.waiting import TIMEOUT
from server.websocket_client import connect_client

TEXT = 0x1
CONTINUATION = 0x0
CLOSE = 0x8
PING = 0x9
PONG = 0xA
FIN = 0x80
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)


def encode_frame(opcode: int, content: bytes = b"", *, fin: bool = True) -> bytes:
    """Return a frame of a client, masked with zeros."""
    assert len(content) < 126
    return bytes([opcode | FIN * fin, 0x80 | len(content)]) + b"\0" * 4 + content


@contextmanager
def open_socket(server: TestServer) -> Iterator[socket.socket]:
    """Open a WebSocket, and yield its socket with a small buffer for what it has not read."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(TIMEOUT)
        client.connect(server.address)
        client.sendall(HANDSHAKE)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        assert head.startswith(b"HTTP/1.1 101")
        yield client


def read_frames(client: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Yield the opcodes and contents of the frames of the server, up to its close."""
    with client.makefile("rb") as received:
        while head := received.read(2):
            length = head[1]
            if length == 126:
                (length,) = struct.unpack("!H", received.read(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", received.read(8))
            content = received.read(length)
            yield head[0] & 0xF, content
            if head[0] & 0xF == CLOSE:
                return


def test_empty_fragments_without_end_close_the_connection(server: TestServer) -> None:
    """No limit of size applies to them, so their number has one, which the close names."""
    with open_socket(server) as client:
        client.sendall(encode_frame(TEXT, fin=False))
        client.sendall(
            encode_frame(CONTINUATION, fin=False) * (websocket_protocol.MAX_FRAGMENTS + 1)
        )
        [(opcode, content)] = read_frames(client)
    assert opcode == CLOSE
    assert struct.unpack("!H", content[:2]) == (1009,)
    assert content[2:] == b"a message has at most 16,384 fragments"


async def test_a_message_may_have_many_fragments(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit a message is read as any other; one more closes the connection."""
    monkeypatch.setattr(websocket_protocol, "MAX_FRAGMENTS", 50)
    message = json.dumps({"type": "response.create", "model": "practice", "input": "Hello"})
    fragments = [message, *[""] * 48]  # the client adds an empty last one
    async with connect_client(server) as client:
        await client.connection.send(fragments)
        events = await client.read_response()
        assert events[-1]["type"] == "response.completed"
        await client.connection.send([*fragments, ""])
        with pytest.raises(ConnectionClosed):
            await client.next_event()
        assert client.connection.close_code == 1009


async def test_messages_arrive_in_order_however_they_are_parsed(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments, pings and messages that are parsed in many turns of the loop are the same as in one."""
    monkeypatch.setattr(responsive, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(websocket_protocol, "PIECE_BYTES", 7)
    async with connect_client(server) as client:
        for number in range(3):
            text = json.dumps(
                {"type": "response.create", "model": "m", "input": f"Say hello {number}"}
            )
            await client.connection.send([text[at : at + 5] for at in range(0, len(text), 5)])
        pong = await client.connection.ping()
        ended = [(await client.read_response())[-1]["response"] for _ in range(3)]
        async with asyncio.timeout(TIMEOUT):
            await pong
    assert [each["output"][0]["content"][0]["text"] for each in ended] == [
        "hello 0",
        "hello 1",
        "hello 2",
    ]


def test_empty_messages_are_answered(server: TestServer) -> None:
    """Each message is answered, however many arrive at once, and the connection can be used afterwards."""
    with open_socket(server) as client:
        client.sendall(encode_frame(TEXT) * 1_000)
        frames = read_frames(client)
        answers = [json.loads(content)["type"] for _, content in islice(frames, 1_000)]
        client.sendall(encode_frame(PING, b"still open"))
        assert next(frames) == (PONG, b"still open")
    assert answers == ["error"] * 1_000


def test_a_client_that_does_not_read_its_pongs_needs_no_memory(server: TestServer) -> None:
    """It gets the newest of them when it reads again; meanwhile other requests are answered."""
    padding = b"x" * 121
    number = 100_000
    with open_socket(server) as client, open_client(server) as http:
        for at in range(number):
            client.sendall(encode_frame(PING, struct.pack("!I", at) + padding))
        assert http.get("/healthz").status_code == 200
        pongs: list[int] = []
        for _, content in read_frames(client):
            pongs.append(struct.unpack("!I", content[:4])[0])
            if pongs[-1] == number - 1:
                break
    assert len(pongs) < number
    assert pongs == sorted(pongs)
