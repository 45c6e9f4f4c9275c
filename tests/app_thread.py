"""Run an ASGI app on a socket in a thread of the tests."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kedge.server.uvicorn_server import LimitedServer, bind, stop_listening


class ThreadServer(LimitedServer):
    """A server that starts and stops immediately, where uvicorn polls ten times a second."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        self.url = ""
        self.ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait until the server is stopped; the tests do not need uvicorn's periodic tick."""
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)  # sets the headers of all responses
        self.ready.set()
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close everything as soon as the last request is finished."""
        await stop_listening(self, sockets or [])
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0.001)
        await self.lifespan.shutdown()

    def tick(self) -> None:
        """Do what the server does once a second, from any other thread."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.on_tick(0), self._loop).result(300)

    def stop(self) -> None:
        """Stop the server, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)


@contextmanager
def run_server(app: Any, **options: Any) -> Iterator[ThreadServer]:
    """Serve an app in a thread and yield the server, which has these options."""
    with bind("127.0.0.1", 0) as listener:
        server = ThreadServer(app, **options)
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            assert server.ready.wait(300)
            yield server
        finally:
            server.stop()
            thread.join(300)


@contextmanager
def serve_app(app: Any, **options: Any) -> Iterator[str]:
    """Serve an app in a thread and yield its address: ``http://127.0.0.1:<port>``."""
    with run_server(app, **options) as server:
        yield server.url
