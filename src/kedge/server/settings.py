"""The settings of a server, with the defaults of ``kedge serve``."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import TYPE_CHECKING, Literal

from kedge._internal.argument_types import check_fields
from kedge._internal.encryption import can_encrypt
from kedge.errors import InvalidSetting, describe_extra
from kedge.server.access import CallerRegistry
from kedge.server.models import Model, PracticeModel
from kedge.server.storage.database import IN_MEMORY

if TYPE_CHECKING:
    from kedge.server.faults import Faults

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for requests, connections and memory.

    Args:
        body_bytes: Maximum size of a request body, and of a message on a WebSocket.
        header_bytes: Maximum size of all headers of a request.
        read_seconds: Time to receive a request body.
        idle_seconds: Time between two requests on a connection, and for the headers of one.
        write_seconds: Time for which a client may read nothing of a response.
        answer_seconds: Time to generate a response; then it fails.
        shutdown_seconds: Time for running responses to finish when the server stops.
        cache_bytes: Memory for cached contexts.
        background_running: Background responses that run at once.
        background_waiting: Background responses that may be queued.
        stream_seconds: Time for which the events of a finished background stream are retained.
        stream_bytes: Memory for these events.
        lease_seconds: Time after which other servers on the same PostgreSQL continue the responses of a
            server that does not renew its claims.
        database_seconds: Time that an operation may wait for PostgreSQL in the queue, for a connection and for locks;
            each statement may run for this time as well.
        socket_seconds: Lifetime of a WebSocket connection.
        socket_lanes: Named lanes on a connection.
        socket_in_flight: Responses that run at once on a connection.
        socket_waiting: Requests that may be queued on a connection.
        socket_memory_bytes: Memory for the unstored responses of a connection.
    """

    body_bytes: int = 32_000_000
    header_bytes: int = 32 * 1024
    read_seconds: float = 60.0
    idle_seconds: float = 75.0
    write_seconds: float = 60.0
    answer_seconds: float = 600.0
    shutdown_seconds: float = 10.0
    cache_bytes: int = 32 * 1024 * 1024
    background_running: int = 16
    background_waiting: int = 256
    stream_seconds: float = 300.0
    stream_bytes: int = 64 * 1024 * 1024
    lease_seconds: float = 15.0
    database_seconds: float = 5.0
    socket_seconds: float = 3600.0
    socket_lanes: int = 32
    socket_in_flight: int = 16
    socket_waiting: int = 64
    socket_memory_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        """Reject values of a wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a server.

    Args:
        db: The database file, ``:memory:``, or the address of a PostgreSQL database, which several
            servers may use at the same time: ``postgresql://user@host/database``.
        token: The bearer token that clients must send, or None.
        retention: Seconds after which responses expire.
        zero_data_retention: Store nothing, and reject chaining.
        model: The model for every name, unless ``models`` is set.
        models: Models by name.
        default: Which of ``models`` is used for all other names; without it they are rejected.
        limits: Limits for requests, connections and memory.
        purge_every: Seconds between two deletions of expired responses.
        any_host: Whether any host name is accepted while no token is needed, and not only loopback names.
        clock: Returns Unix time. A server on PostgreSQL uses the time of the database, plus the difference
            of this function from ``time.time``.
        faults: Faults to inject, or None for a server without fault injection.
        unknown_parameters: ``reject`` unknown parameters with 400, as the hosted APIs do, or
            ``ignore`` them, which is logged once and listed in the response header
            ``x-kedge-ignored-parameters``. None rejects them for the practice model and ignores them
            for any other model.
        encrypts: Whether reasoning and compactions can be encrypted, by default whether the extra ``encryption`` is
            installed. Without it, requests for encrypted reasoning are answered without it.
        in_store: Whether ``db`` is a store. The responses are then in its tables for the practice model, which
            several processes may use at the same time.
        max_db_bytes: Size of the stored responses above which the oldest are deleted, or None.
        callers: Named tokens that are accepted besides ``token``, or None. Each caller sees only objects that
            were stored with a token of the same namespace. With it, requests without a token are rejected.
        trusted_proxies: Addresses or networks of reverse proxies, separated by commas: the client of a request
            from one of them, and its scheme, are in the headers ``X-Forwarded-For`` and ``X-Forwarded-Proto``.

    Example:
        ``create_app(Settings(db="server.db", token="secret"))``
    """

    db: str = IN_MEMORY
    token: str | None = None
    retention: float = 30 * DAY
    zero_data_retention: bool = False
    model: Model = field(default_factory=PracticeModel)
    models: Mapping[str, Model] = field(default_factory=dict[str, Model])
    default: str | None = None
    limits: Limits = field(default_factory=Limits)
    purge_every: float = 3600.0
    any_host: bool = False
    clock: Callable[[], float] = time.time
    faults: "Faults | None" = None
    unknown_parameters: Literal["ignore", "reject"] | None = None
    encrypts: bool = field(default_factory=can_encrypt)
    in_store: bool = False
    max_db_bytes: int | None = None
    callers: CallerRegistry | None = None
    trusted_proxies: str = ""

    def __post_init__(self) -> None:
        """Reject invalid values, which would have the effect of others."""
        check_fields(self)
        for address in filter(None, self.trusted_proxies.split(",")):
            try:
                ip_network(address.strip())
            except ValueError as error:
                raise InvalidSetting(
                    f"trusted_proxies must be addresses or networks, separated by commas: {error}"
                ) from error
        if self.unknown_parameters not in ("ignore", "reject", None):
            raise InvalidSetting(
                f"unknown_parameters must be ignore or reject, not {self.unknown_parameters!r}"
            )
        if self.encrypts and not can_encrypt():
            raise InvalidSetting(f"encrypts must be False: {describe_extra('encryption')}")
