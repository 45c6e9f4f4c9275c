"""Run a server in a thread of this process, on a real socket."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from kedge.errors import CannotServe
from kedge.server.app import create_app
from kedge.server.request_log import RecordedRequest
from kedge.server.settings import Settings
from kedge.server.state import ServerState
from kedge.server.uvicorn_server import UvicornServer, bind

T = TypeVar("T")

CALL_TIMEOUT_SECONDS = 60.0


class ServerThread:
    """A server with an event loop in its own thread, for sync and async code.

    Args:
        settings: The settings of the server.
        listener: Called with the record of every request, in the thread of the server.
    """

    def __init__(
        self, settings: Settings, listener: Callable[[RecordedRequest], None] | None = None
    ) -> None:
        self.settings = settings
        app = create_app(settings, listener)
        self._service: ServerState = app.state.service
        self._socket = bind("127.0.0.1", 0)
        self.address: tuple[str, int] = self._socket.getsockname()
        self._ready = threading.Event()
        self._server = UvicornServer(app, on_started=self._ready.set)
        self._thread = threading.Thread(target=self._run, name="kedge-server", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server: ``http://127.0.0.1:<port>``."""
        host, port = self.address
        return f"http://{host}:{port}"

    @property
    def base_url(self) -> str:
        """The base URL for clients of the API: ``http://127.0.0.1:<port>/v1``."""
        return f"{self.url}/v1"

    def start(self) -> None:
        """Start serving; requests are accepted when this returns.

        Raises:
            CannotServe: If the server did not start.
        """
        self._thread.start()
        self._ready.wait()
        if not self._server.started:
            raise CannotServe("the server in this process could not start")

    def stop(self) -> None:
        """Stop serving, and wait until the server has stopped."""
        self._server.stop()
        self._thread.join()

    def call(self, work: Callable[[ServerState], T]) -> T:
        """Call a function with the server's state, in the thread of the server.

        Args:
            work: The function.

        Returns:
            Its result.

        Raises:
            CannotServe: If the server is not running.
        """

        async def inside() -> T:
            return work(self._service)

        if self._server.loop is None or not self._thread.is_alive():
            raise CannotServe("the server in this process is not running")
        future = asyncio.run_coroutine_threadsafe(inside(), self._server.loop)
        return future.result(CALL_TIMEOUT_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self._ready.set()
