"""Everything that can be chosen about a server, with the defaults of ``kedge serve``."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kedge.server.access import LOOPBACK_NAMES
from kedge.server.faults import Faults
from kedge.server.models import Model, PracticeModel
from kedge.server.storage.database import IN_MEMORY

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take of the server, and one WebSocket connection."""

    body_bytes: int = 32_000_000
    header_bytes: int = 32 * 1024
    read_seconds: float = 60.0
    idle_seconds: float = 75.0
    answer_seconds: float = 600.0
    shutdown_seconds: float = 10.0
    cache_bytes: int = 32 * 1024 * 1024
    background_running: int = 16
    background_waiting: int = 256
    stream_seconds: float = 300.0
    stream_bytes: int = 64 * 1024 * 1024
    socket_seconds: float = 3600.0
    socket_lanes: int = 32
    socket_in_flight: int = 16
    socket_waiting: int = 64
    socket_memory_bytes: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server behaves.

    ``db`` is a file or ``:memory:``; ``hosts`` are the names it answers to, None for any;
    ``clock`` gives Unix time; ``faults`` are what it does wrong on purpose, None for a server that
    cannot. ``model`` answers to any name, unless there are ``models`` by name; then ``default``
    names the one that answers to all other names, and without it these are refused.
    ``unknown_parameters`` says what happens to members of a request that this server does not know:
    ``reject`` them with 400, as the hosted APIs do, or ``ignore`` them, which is logged once and
    listed in the response header ``x-kedge-ignored-parameters``. None rejects them for the practice
    model and ignores them in front of any other model.
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
    hosts: frozenset[str] | None = LOOPBACK_NAMES
    clock: Callable[[], float] = time.time
    faults: Faults | None = None
    unknown_parameters: Literal["ignore", "reject"] | None = None
