"""Running the app: uvicorn with our limits, quick to start and clean to stop."""

import asyncio
import socket
from typing import Any

import uvicorn


class Server(uvicorn.Server):
    """A uvicorn server that can be started and stopped from another thread without polling."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Tick once a second, or at once when asked to stop."""
        self._loop = asyncio.get_running_loop()
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 10
            try:
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def stop(self) -> None:
        """Ask the server to stop, from any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop on a signal."""
        super().handle_exit(sig, frame)
        self.stop()


def make_server(app: Any, *, header_bytes: int, grace: float) -> Server:
    """Make a server for the app; it is given its sockets when it is run."""
    return Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=header_bytes,
            timeout_graceful_shutdown=int(grace) + 1,
        )
    )


def bind(host: str, port: int) -> socket.socket:
    """Bind the listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # or asyncio leaves Nagle on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
