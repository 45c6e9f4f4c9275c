"""Serving the page beside the server, in one process: the page talks through the server next to it."""

import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kedge.engines import Engine
from kedge.providers import connect
from kedge.server.app import create_app
from kedge.server.run import Server
from kedge.server.settings import Settings
from kedge.server.sqlite import IN_MEMORY
from kedge.store import open_store
from kedge.web.app import Beside, create_page
from kedge.web.desk import Desk
from kedge.web.security import Terms


@dataclass(frozen=True, slots=True)
class PageSettings:
    """How a page behaves: the address of its store, and what goes with every Conversation."""

    store: str
    keep_bodies: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@asynccontextmanager
async def with_page(
    settings: Settings, page: PageSettings, url: str, started: Callable[[], None] | None = None
) -> AsyncGenerator[Server]:
    """A server with a page beside it, ready to ``serve``; ``url`` is where both will be."""
    async with (
        await open_store(page.store, keep_bodies=page.keep_bodies) as store,
        own_engine(settings, url) as engine,
    ):
        desk = Desk(store, engine, models_of(settings), page.settings)
        terms = Terms(settings.token, settings.hosts)
        app = create_page(desk, terms, f"{url}/v1")
        server = Server(Beside(create_app(settings), app), started=started)
        app.state.stopping = lambda: server.should_exit
        yield server


def own_engine(settings: Settings, url: str) -> Engine:
    """An engine that talks to the server next to it."""
    return connect(
        f"responses:{url}/v1#{models_of(settings)[0]}",
        api_key=settings.token,
        scope=scope_of(settings.db),
        retention=settings.retention,
    )


def models_of(settings: Settings) -> tuple[str, ...]:
    """The names of the server's models, the one that is asked by default first."""
    names = tuple(settings.models) or (settings.model.name,)
    first = settings.default if settings.default and settings.default in names else names[0]
    return (first, *(name for name in names if name != first))


def scope_of(db: str) -> str:
    """What shares the memory of a database: whoever serves the same file, at whatever address."""
    name = secrets.token_hex(8) if db == IN_MEMORY else hashlib.sha256(db.encode()).hexdigest()[:16]
    return f"kedge/{name}"
