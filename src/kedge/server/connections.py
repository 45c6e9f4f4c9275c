"""The connections of a server: how many there are, how long they may wait for a request, and for their clients to read.

A connection needs a descriptor, of which a process has a limited number. If all are in use, no client can connect and
no file can be opened. So a server accepts fewer connections than it has descriptors, and one client gets only a part of
them. HTTP connections and WebSockets are in one table, by their transports.
"""

import asyncio
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, cast

from uvicorn.server import ServerState

from kedge.observe import get_logger

log = get_logger("kedge.server")

USEFUL_DESCRIPTORS = 65_536
"""The number of descriptors up to which a server uses what the system permits."""
DEFAULT_DESCRIPTORS = 1_024
"""The number of descriptors that is assumed on a system without a limit for them."""
CONNECTION_SHARE = 0.8
"""The share of the descriptors that connections may use; databases, files and models need the others."""
CLIENT_SHARE = 0.25
"""The share of the connections that one client may have, unless it is a trusted proxy."""
EXHAUSTED_SHARE = 0.25
"""The share of the connections of which idle ones are closed when there is no descriptor for a new one."""
EXHAUSTED_SECONDS = 0.5
"""Seconds for which no more idle connections are closed then: asyncio accepts none for a second after an error."""
ACKNOWLEDGED_AT = 120
"""The place of ``tcpi_bytes_acked`` in the structure ``tcp_info`` of Linux."""
LOG_SECONDS = 60.0
"""Seconds between two log records about too many connections."""


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system permits and a server can use."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = USEFUL_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, USEFUL_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def get_descriptor_limit() -> int:
    """Return how many descriptors a server in this process can use."""
    if sys.platform == "win32":
        return DEFAULT_DESCRIPTORS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return USEFUL_DESCRIPTORS
    return min(soft, USEFUL_DESCRIPTORS)


def find_address(transport: asyncio.Transport) -> IPv4Address | IPv6Address | None:
    """Return the address of a client; None for a client on a Unix socket."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return None
    host, *_ = cast("tuple[str, ...]", peer)
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def name_client(address: IPv4Address | IPv6Address | None) -> str:
    """Return what counts as one client: an IPv4 address, or a network of IPv6, all of which one client may have."""
    if isinstance(address, IPv6Address):
        return str(ip_network((address, 64), strict=False))
    return str(address or "a Unix socket")


def measure_progress(transport: asyncio.Transport) -> tuple[int, int]:
    """Return how many bytes wait for a client to read them, and how many its system has acknowledged so far.

    The first number may be the same again although the client reads, if the app writes as much. The second one, which
    Linux has, is not.
    """
    waiting = transport.get_write_buffer_size()
    acknowledged = 0
    if waiting and sys.platform == "linux":
        with suppress(OSError, struct.error):  # the connection has just ended, or is not TCP
            client = transport.get_extra_info("socket")
            info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKNOWLEDGED_AT + 8)
            acknowledged = int(struct.unpack_from("=Q", info, ACKNOWLEDGED_AT)[0])
    return waiting, acknowledged


def close_transport(transport: asyncio.Transport) -> None:
    """Close a connection, without waiting until the client has read everything."""
    if transport.get_write_buffer_size():
        transport.abort()
    else:
        transport.close()


@dataclass(slots=True)
class ClientConnections:
    """The number of connections of one client, and the connections that wait for a request, the longest first."""

    name: str
    number: int = 0
    idle: dict[asyncio.Transport, None] = field(default_factory=dict[asyncio.Transport, None])


@dataclass(slots=True)
class UnreadResponse:
    """How far a client has read a response that waits for it (`measure_progress`), and since when."""

    progress: tuple[int, int]
    since: float


class ConnectionTable(ServerState):
    """The connections of a server, which uvicorn passes to each of them.

    If there are too many, the longest idle one is closed; if none is idle, the new one is rejected. The same applies to
    the connections of one client, unless it is a trusted proxy.

    Args:
        most: The maximum number of connections.
        trusted_proxies: Addresses or networks of reverse proxies, separated by commas.
    """

    def __init__(self, most: int, trusted_proxies: str = "") -> None:
        super().__init__()
        self._most = most
        self._most_each = max(1, int(most * CLIENT_SHARE))
        names = filter(None, trusted_proxies.split(","))
        self._proxies = [ip_network(name.strip()) for name in names]
        self._clients: dict[str, ClientConnections] = {}
        self._client_of: dict[asyncio.Transport, ClientConnections] = {}
        self._idle: dict[asyncio.Transport, float] = {}
        """Since when connections wait for a request, the longest first."""
        self._waiting: dict[asyncio.Transport, UnreadResponse] = {}
        self._logged_at = -LOG_SECONDS
        self._exhausted_at = -EXHAUSTED_SECONDS
        self._closed = 0
        self._rejected = 0

    def admit(self, transport: asyncio.Transport) -> bool:
        """Add a new connection, which waits for a request; return False if it must be rejected."""
        address = find_address(transport)
        name = name_client(address)
        client = self._clients.get(name) or ClientConnections(name)
        if client.number >= self._most_each and not self._is_trusted(address):
            problem = f"{name} has a quarter of the {self._most} possible connections"
            if not self._make_room(problem, client.idle):
                return False
        elif len(self._client_of) >= self._most:
            problem = f"there are {self._most} connections, and no more are possible"
            if not self._make_room(problem, self._idle):
                return False
        client.number += 1
        self._clients[name] = client
        self._client_of[transport] = client
        self.mark_idle(transport)
        return True

    def remove(self, transport: asyncio.Transport) -> None:
        """Remove a connection that has ended."""
        self.mark_busy(transport)
        client = self._client_of.pop(transport)
        client.number -= 1
        if not client.number:
            del self._clients[client.name]

    def mark_idle(self, transport: asyncio.Transport) -> None:
        """Note that a connection waits for a request from now on."""
        self.mark_busy(transport)
        self._idle[transport] = time.monotonic()
        self._client_of[transport].idle[transport] = None

    def mark_busy(self, transport: asyncio.Transport) -> None:
        """Note that a connection has a request, is a WebSocket, or is being closed."""
        if self._idle.pop(transport, None) is not None:
            del self._client_of[transport].idle[transport]

    def close_idle(self, seconds: float) -> None:
        """Close the connections that have waited longer for a request, or for the end of its headers."""
        now = time.monotonic()
        for transport, since in list(self._idle.items()):
            if now - since <= seconds:
                return
            self.mark_busy(transport)
            close_transport(transport)

    def close_unread(self, seconds: float) -> None:
        """Close the connections whose clients have read nothing of a response for a longer time."""
        now = time.monotonic()
        waiting: dict[asyncio.Transport, UnreadResponse] = {}
        unread: list[asyncio.Transport] = []
        for transport in self._client_of:
            progress = measure_progress(transport)
            if not progress[0]:
                continue
            response = self._waiting.get(transport)
            if response is None or response.progress != progress:
                waiting[transport] = UnreadResponse(progress, now)
            elif now - response.since <= seconds:
                waiting[transport] = response
            else:
                unread.append(transport)
        self._waiting = waiting
        for transport in unread:
            transport.abort()
        if unread:
            message = "closed %d connections whose clients read nothing of a response for %g seconds, such as %s"
            log.warning(message, len(unread), seconds, self._client_of[unread[0]].name)

    def report_exhausted(self, error: OSError) -> None:
        """Close idle connections, because the system has no descriptor for a new one.

        Files and databases have none either, and only one new connection would be accepted a second if one were closed.
        """
        now = time.monotonic()
        if now - self._exhausted_at < EXHAUSTED_SECONDS:
            return
        self._exhausted_at = now
        problem = f"a connection could not be accepted: {error.strerror}"
        share = max(1, int(self._most * EXHAUSTED_SHARE))
        for _ in range(
            min(share, len(self._idle)) or 1
        ):  # without an idle one, a rejection is counted
            self._make_room(problem, self._idle)

    def _is_trusted(self, address: IPv4Address | IPv6Address | None) -> bool:
        return address is None or any(address in network for network in self._proxies)

    def _make_room(self, problem: str, idle: dict[asyncio.Transport, Any]) -> bool:
        """Close the first of these idle connections, if there is one, and log what has happened once a minute."""
        transport = next(iter(idle), None)
        if transport is None:
            self._rejected += 1
        else:
            self._closed += 1
            self.mark_busy(transport)
            close_transport(transport)
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            message = "%s; %d idle connections were closed and %d new ones rejected since the last such record"
            log.warning(message, problem, self._closed, self._rejected)
            self._logged_at = now
            self._closed = 0
            self._rejected = 0
        return transport is not None
