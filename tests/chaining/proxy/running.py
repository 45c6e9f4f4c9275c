"""Proxies in a thread of the tests, and without a socket."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from app_thread import serve_app
from kedge.chaining.proxy import create_proxy_app
from kedge.store import Store
from kedge.store.open import open_current_database


@contextmanager
def serve_proxy(upstream: str, **options: Any) -> Iterator[str]:
    """Run a proxy in a thread and yield its base URL."""
    with serve_app(create_proxy_app(upstream, **{"trust": "always", **options})) as url:
        yield url


@asynccontextmanager
async def open_asgi(
    respond: Any = None, upstream: str = "http://upstream", **options: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a proxy, without a socket, whose upstream is a function or a server."""
    if respond is not None:
        options["client"] = httpx2.AsyncClient(transport=httpx2.MockTransport(respond))
    app = create_proxy_app(f"{upstream}/v1", **options)
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client,
    ):
        yield client


@contextmanager
def open_store(folder: Path, **options: Any) -> Iterator[Store]:
    """Yield a store in a folder."""
    store = Store(open_current_database(f"sqlite:///{folder}/store.db"), **options)
    yield store
    store.database.close()
