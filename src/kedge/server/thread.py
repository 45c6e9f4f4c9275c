"""A server in a thread of this process: on a real socket, ready when ``start`` returns."""

import asyncio
import threading
from collections.abc import Callable

from kedge.server.access import Exchange
from kedge.server.app import create_app
from kedge.server.run import bind, make_server
from kedge.server.settings import Settings


class ServerThread:
    """A running server with a loop of its own; use it from sync and async code alike."""

    def __init__(
        self, settings: Settings, observe: Callable[[Exchange], None] | None = None
    ) -> None:
        self.settings = settings
        app = create_app(settings, observe)
        limits = settings.limits
        self._socket = bind("127.0.0.1", 0)
        self._server = make_server(app, header_bytes=limits.header_bytes, grace=1)
        self._thread = threading.Thread(target=self._run, name="kedge-server", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server: ``http://127.0.0.1:<port>``."""
        host, port = self._socket.getsockname()
        return f"http://{host}:{port}"

    @property
    def base_url(self) -> str:
        """What a client of the API wants as its base URL."""
        return f"{self.url}/v1"

    def start(self) -> None:
        """Start serving; requests are accepted when this returns."""
        self._socket.listen(128)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, and wait until it has."""
        self._server.stop()
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
