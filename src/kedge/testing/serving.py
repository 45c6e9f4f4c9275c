"""``serve``: one real server in a thread of its own, with a view of what it was sent."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kedge.server.app import create_app
from kedge.server.run import bind, make_server
from kedge.server.settings import Settings

if TYPE_CHECKING:
    from kedge.server.access import Exchange


class TestServer:
    """A running server. Use it from sync and async tests alike.

    ``requests`` holds every request so far, with its body and with the context the model saw.
    """

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.requests: list[Exchange] = []
        self._app = create_app(settings, self.requests.append)
        self._socket = bind("127.0.0.1", 0)
        self._server = make_server(self._app, header_bytes=32768, grace=1)
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


@contextmanager
def serve(**settings: Any) -> Generator[TestServer]:
    """Run a server for as long as the block lasts."""
    server = TestServer(Settings(**settings))
    server.start()
    try:
        yield server
    finally:
        server.stop()
