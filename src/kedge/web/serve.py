"""Serve the page and the server in one process; the page sends its requests through the server."""

import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kedge.engines import Engine
from kedge.providers import connect
from kedge.server.app import create_app
from kedge.server.settings import Settings
from kedge.server.storage.database import IN_MEMORY
from kedge.server.uvicorn_server import UvicornServer
from kedge.store import open_store
from kedge.web.app import PathDispatch, create_page
from kedge.web.models import ModelSelector
from kedge.web.security import PageAuth
from kedge.web.service import ConversationService


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Settings of a page: the address of its store, and settings of every Conversation."""

    store: str
    keep_bodies: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@asynccontextmanager
async def open_page_server(
    settings: Settings, page: PageSettings, url: str, started: Callable[[], None] | None = None
) -> AsyncGenerator[UvicornServer]:
    """Create a server with a page, ready to ``serve``; ``url`` is the address of both."""
    async with (
        await open_store(page.store, keep_bodies=page.keep_bodies) as store,
        connect_own_server(settings, url) as engine,
        AsyncExitStack() as stack,
    ):
        models = ModelSelector(engine, model_names(settings), f"{url}/v1")
        stack.push_async_callback(models.aclose)
        auth = PageAuth(settings.token, settings.hosts)
        service = ConversationService(store, models, page.settings)
        stack.push_async_callback(service.deletions.aclose)
        await service.deletions.resume(store)
        stack.push_async_callback(service.runs.stop_all)
        app = create_page(service, auth, f"{url}/v1")
        server = UvicornServer(PathDispatch(create_app(settings), app), on_started=started)
        app.state.stopping = lambda: server.should_exit
        yield server


def connect_own_server(settings: Settings, url: str) -> Engine:
    """Return an engine for the server beside the page."""
    return connect(
        f"responses:{url}/v1#{model_names(settings)[0]}",
        api_key=settings.token,
        scope=database_scope(settings.db),
        retention=settings.retention,
    )


def model_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the server's models, the default first."""
    names = tuple(settings.models) or (settings.model.name,)
    first = settings.default if settings.default and settings.default in names else names[0]
    return (first, *(name for name in names if name != first))


def database_scope(db: str) -> str:
    """Return the scope of a server database: the same file has the same scope at any address."""
    name = secrets.token_hex(8) if db == IN_MEMORY else hashlib.sha256(db.encode()).hexdigest()[:16]
    return f"kedge/{name}"
