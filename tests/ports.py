"""Ports for servers that are started again, or by another program."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserve_port() -> Iterator[int]:
    """Yield a port that a server can use, now and when it is started again, and that no other process is given."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]
