"""The least HTTP client there is: a connection, requests one after the other, bytes in and out.

It prepares nothing and parses as little as possible, so that a benchmark of a server on a small
machine is not a benchmark of its client.
"""

import json
import re
import socket
from types import TracebackType
from typing import Any, Self

_CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_\w+)"')


class Client:
    """A connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def send(self, request: bytes) -> bytes:
        """Send a prepared request and return the body of the answer, as it came."""
        self.start(request)
        return self.receive()

    def start(self, request: bytes) -> None:
        """Send a prepared request, whose answer is received later."""
        self._socket.sendall(request)

    def receive(self) -> bytes:
        """Return the body of the answer to the request that was started."""
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive_more()
        head, body = data[:end], data[end + 4 :]
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head[:40]!r} {body[:300]!r}")
        length = _CONTENT_LENGTH.search(head)
        chunks = [body]
        if length is None:
            while not b"".join(chunks[-2:]).endswith(b"0\r\n\r\n"):
                chunks.append(self._receive_more())
            return b"".join(chunks)
        missing = int(length[1]) - len(body)
        while missing > 0:
            chunks.append(self._receive_more())
            missing -= len(chunks[-1])
        return b"".join(chunks)

    def _receive_more(self) -> bytes:
        data = self._socket.recv(262_144)
        if not data:
            raise RuntimeError("the server closed the connection")
        return data


def encode_post(path: str, body: Any) -> bytes:
    """Prepare a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def decode_chunked(body: bytes) -> bytes:
    """Take the frames of a chunked answer off."""
    parts: list[bytes] = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def find_response_id(answer: bytes) -> str:
    """Read the id of the response out of an answer."""
    match = _RESPONSE_ID.search(answer)
    assert match is not None, answer[:200]
    return match[1].decode()
