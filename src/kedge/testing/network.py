"""Reject connections to other machines during tests.

Tests of a chat product should never reach a provider by accident, with a key that happens to be in the
environment. Loopback stays open, so ``serve()`` works.
"""

import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from kedge._internal.urls import is_loopback
from kedge.errors import KedgeError


class NetworkForbidden(KedgeError, OSError):
    """A test tried to reach another machine."""


@contextmanager
def forbid_network() -> Generator[None]:
    """Allow connections to loopback only, inside the block.

    Raises:
        NetworkForbidden: In the block, when code connects to or looks up another machine.

    Example:
        >>> with forbid_network():
        ...     run_my_tests()
    """
    from unittest.mock import patch

    resolve = socket.getaddrinfo

    def checked_resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local(host):
            raise NetworkForbidden(f"a test tried to look up {host!r}; use kedge.testing.serve()")
        return resolve(host, *args, **kwargs)

    with (
        patch.object(socket.socket, "connect", _add_check(socket.socket.connect)),
        patch.object(socket.socket, "connect_ex", _add_check(socket.socket.connect_ex)),
        patch.object(socket, "getaddrinfo", checked_resolve),
    ):
        yield


def _add_check(connect: Callable[[socket.socket, Any], Any]) -> Callable[..., Any]:
    """Return a method of sockets that connects to this machine only."""

    def call(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise NetworkForbidden(f"a test tried to reach {address[0]}; use kedge.testing.serve()")
        return connect(self, address)

    return call


def _is_local(host: Any) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    return not name or is_loopback(name)
