"""A proxy in a thread of the tests."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kedge.proxy import create_proxy_app
from kedge.server.uvicorn_server import bind


@contextmanager
def serve_proxy(upstream: str, **options: Any) -> Iterator[str]:
    """Run a proxy in a thread; give its base URL."""
    with serve_app(create_proxy_app(upstream, **{"trust": "always", **options})) as url:
        yield url


@contextmanager
def serve_app(app: Starlette) -> Iterator[str]:
    """Run an app in a thread; give its base URL."""
    with bind("127.0.0.1", 0) as listener:
        started = threading.Event()

        class Server(uvicorn.Server):
            async def main_loop(self) -> None:
                started.set()
                await super().main_loop()

        server = Server(uvicorn.Config(app, log_config=None, ws="websockets-sansio"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            assert started.wait(300)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(300)
